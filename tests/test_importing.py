"""Actions that follow an import, with modules made for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cudnn_mha.integrations.importing import when_imported

NAMES = ("hooked_a", "hooked_b", "hooked_c")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in NAMES:
        sys.modules.pop(name, None)


def clean(name: str) -> bool:
    """The module looks as if nobody had been there."""
    module = sys.modules[name]
    assert module.__spec__ is not None
    loader: Any = module.__loader__  # that of its spec, and of a file
    ours = [finder for finder in sys.meta_path if "cudnn_mha" in str(finder)]
    own = loader is module.__spec__.loader and hasattr(loader, "get_filename")
    return own and "cudnn_mha" not in type(loader).__module__ and not ours


def test_it_waits_for_the_end_of_the_import(folder: Path) -> None:
    (folder / "hooked_a.py").write_text("import hooked_b\nvalue = 1\n")
    (folder / "hooked_b.py").write_text("")
    found: list[Any] = []
    when_imported("hooked_a", lambda: found.append(sys.modules["hooked_a"].value))
    importlib.import_module("hooked_b")
    assert found == []
    assert importlib.import_module("hooked_a").value == 1
    assert found == [1]
    assert clean("hooked_a")


def test_it_runs_at_once_where_the_module_is_there(folder: Path) -> None:
    (folder / "hooked_a.py").write_text("")
    importlib.import_module("hooked_a")
    found: list[int] = []
    when_imported("hooked_a", lambda: found.append(1))
    assert found == [1]
    assert clean("hooked_a")


def test_a_module_that_is_being_imported(folder: Path) -> None:
    """The action follows with the next import, and what it imports itself is there once."""
    (folder / "hooked_a.py").write_text("import hooked_b\nvalue = 1\n")
    (folder / "hooked_b.py").write_text(
        "import sys\n"
        "from cudnn_mha.integrations.importing import when_imported\n"
        "def action():\n"
        "    import hooked_c\n"
        "    hooked_c.seen = sys.modules['hooked_a'].value\n"
        "when_imported('hooked_a', action)\n"
    )
    (folder / "hooked_c.py").write_text("")
    importlib.import_module("hooked_a")
    assert "hooked_c" not in sys.modules
    assert importlib.import_module("hooked_c").seen == 1
    assert clean("hooked_c")
    assert clean("hooked_a")


def test_an_import_that_fails_may_be_tried_again(folder: Path) -> None:
    (folder / "hooked_a.py").write_text("raise ValueError('not yet')\n")
    found: list[int] = []
    when_imported("hooked_a", lambda: found.append(1))
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module("hooked_a")
    (folder / "hooked_a.py").write_text("longer_than_before = True\n")
    importlib.invalidate_caches()
    importlib.import_module("hooked_a")
    assert found == [1]


def test_a_module_that_is_nowhere(folder: Path) -> None:
    when_imported("hooked_nowhere", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="hooked_nowhere"):
        importlib.import_module("hooked_nowhere")


def test_an_action_that_raises_is_a_warning(folder: Path) -> None:
    (folder / "hooked_a.py").write_text("value = 1\n")

    def action() -> None:
        raise OSError("no luck")

    when_imported("hooked_a", action)
    with pytest.warns(RuntimeWarning, match=r"not registered with hooked_a \(OSError: no luck\)"):
        importlib.import_module("hooked_a")
    assert clean("hooked_a")


def test_a_warning_that_is_an_error_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "hooked_a.py").write_text("value = 1\n")

    def action() -> None:
        raise OSError("no luck")

    when_imported("hooked_a", action)
    assert importlib.import_module("hooked_a").value == 1  # warnings are errors in these tests
    assert "not registered with hooked_a (OSError" in capsys.readouterr().err
