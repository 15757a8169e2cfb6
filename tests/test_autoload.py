"""What `import torch` does because this package is installed, each in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pytest

from cudnn_mha import autoload, config

ENABLED, DISABLED = config.ENABLED, config.DISABLED

REPORT = """
import json, sys
import torch
loaded = [name in sys.modules for name in ("cudnn_mha.backend", "cudnn")]
import cudnn_mha
state = cudnn_mha.status()
print(json.dumps({
    "backend": loaded[0], "cudnn": loaded[1] or "cudnn" in sys.modules,
    "enabled": state.enabled, "why": state.why,
    "provider": state.provider, "first": state.priority[0],
}))
"""


def run(code: str, **variables: str) -> tuple[dict[str, Any], str]:
    """What code prints as JSON, and its standard error, with these variables of ours alone."""
    names = {*config.VARIABLES, "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHONWARNINGS"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment | variables,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


def is_off(found: dict[str, Any]) -> bool:
    state = (found["enabled"], found["provider"], found["first"] == "CUDNN_ATTENTION")
    return state == (False, "PyTorch", False)


def test_the_entry_point_is_declared() -> None:
    installed = entry_points(group="torch.backends")
    expected = EntryPoint("cudnn_mha", "cudnn_mha.autoload:autoload", "torch.backends")
    assert expected in installed
    assert expected.load() is autoload.autoload


@pytest.mark.parametrize("variables", [{}, {ENABLED: ""}])
def test_unset_nothing_is_loaded(variables: dict[str, str]) -> None:
    found, errors = run(REPORT, **variables)
    assert is_off(found)
    assert found["why"] == "nobody asked for it"
    assert not found["backend"]
    assert not found["cudnn"]
    assert errors == ""


def test_0_is_off() -> None:
    found, errors = run(REPORT, **{ENABLED: "0"})
    assert is_off(found)
    assert found["why"] == "nobody asked for it"
    assert errors == ""


@pytest.mark.parametrize("value", ["1", "true"])
def test_1_is_on_from_import_torch_on(value: str) -> None:
    found, errors = run(REPORT, **{ENABLED: value})
    assert found == {
        "backend": True,
        "cudnn": False,
        "enabled": True,
        "why": f"{ENABLED} is set",
        "provider": "cudnn_mha",
        "first": "CUDNN_ATTENTION",
    }
    assert errors == ""


@pytest.mark.parametrize("variables", [{ENABLED: "1"}, {ENABLED: "0"}, {}])
def test_disabled_wins_without_a_word(variables: dict[str, str]) -> None:
    found, errors = run(REPORT, **{DISABLED: "1"}, **variables)
    assert is_off(found)
    assert not found["cudnn"]
    if variables == {ENABLED: "1"}:
        assert found["why"] == f"{DISABLED}=1 is set, which wins over everything else"
    assert errors == ""


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({ENABLED: "maybe"}, f"{ENABLED} must be 0 or 1, got 'maybe'"),
        ({ENABLED: "1", config.CACHE_SIZE: "0"}, f"{config.CACHE_SIZE} must be a whole number"),
    ],
)
def test_a_value_that_means_nothing_is_one_warning(variables: dict[str, str], reason: str) -> None:
    # The settings are mended after the import: what is looked at is what the import left.
    code = f"""
import os
import torch
for name in {list(variables)}:
    del os.environ[name]
{REPORT}"""
    found, errors = run(code, **variables)
    assert is_off(found)
    assert found["why"].startswith(reason)
    assert errors.count("RuntimeWarning") == 1
    assert f"ValueError: {reason}" in errors
    assert "PyTorch's own attention stays in place" in errors
    assert "Traceback" not in errors


def test_a_package_that_cannot_be_imported_is_one_warning() -> None:
    found, errors = run(
        """
import json, sys
sys.modules["cudnn_mha.backend"] = None
import torch
attend = torch.nn.functional.scaled_dot_product_attention
print(json.dumps({"shape": list(attend(*torch.ones(3, 1, 2, 4, 8)).shape)}))
""",
        **{ENABLED: "1"},
    )
    assert found == {"shape": [1, 2, 4, 8]}
    assert errors.count("RuntimeWarning") == 1
    assert "cudnn_mha cannot be enabled" in errors
    assert "ModuleNotFoundError: import of cudnn_mha.backend halted" in errors
    assert "Traceback" not in errors


def test_operators_of_another_pytorch_are_one_warning() -> None:
    code = f"""
import os
os.environ["{ENABLED}"] = ""
import torch
from cudnn_mha import backend
from cudnn_mha.autoload import autoload
backend.SCHEMAS[backend.BACKWARD] = "()"
os.environ["{ENABLED}"] = "1"
autoload()
{REPORT}"""
    found, errors = run(code)
    assert is_off(found)
    assert "is not the one that cudnn_mha knows" in found["why"]
    assert errors.count("RuntimeWarning") == 1
    assert found["why"] in errors


def test_pytorchs_switch_keeps_it_off() -> None:
    found, errors = run(REPORT, **{ENABLED: "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert is_off(found)
    assert not found["backend"]
    assert errors == ""


def test_unset_it_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENABLED, raising=False)

    def seconds() -> float:
        start = time.perf_counter()
        autoload.autoload()
        return time.perf_counter() - start

    assert statistics.median(seconds() for _ in range(1000)) < 1e-4  # about a microsecond


def test_unset_its_import_is_light() -> None:
    code = """
import importlib, json, sys, time
before = set(sys.modules)
start = time.process_time()
importlib.import_module("cudnn_mha.autoload").autoload()
seconds = time.process_time() - start
loaded = sorted(n for n in set(sys.modules) - before if not n.startswith("cudnn_mha"))
print(json.dumps({"seconds": seconds, "loaded": loaded}))
"""
    quickest = min((run(code)[0] for _ in range(3)), key=lambda found: found["seconds"])
    assert "torch" not in quickest["loaded"]
    assert quickest["seconds"] < 0.02, quickest  # about a millisecond where nothing else runs


def test_a_fork_after_the_import_has_it_too() -> None:
    found, errors = run(
        """
import json, os
import torch
import cudnn_mha
child = os.fork()
if child == 0:
    state = cudnn_mha.status()
    os._exit(0 if state.enabled and state.provider == "cudnn_mha" else 1)
_, code = os.waitpid(child, 0)
print(json.dumps({"code": os.waitstatus_to_exitcode(code)}))
""",
        **{ENABLED: "1"},
    )
    assert found == {"code": 0}
    assert errors == ""
