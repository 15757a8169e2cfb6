"""Environment variables and sizes in words."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from cudnn_mha import config
from cudnn_mha.config import (
    BUILD,
    CACHE_BYTES,
    CACHE_DIR,
    CACHE_SIZE,
    DISABLED,
    DP_WORKSPACE_LIMIT,
    ENABLED,
    LENGTHS,
    PLANS,
    RECORD,
    WORKSPACE_LIMIT,
    Settings,
)

DEFAULTS = Settings(
    enabled=False,
    disabled=False,
    workspace_limit=None,
    cache_size=1024,
    cache_dir=platformdirs.user_cache_path("cudnn_mha"),
    cache_bytes=2**30,
    plans=(),
    record=None,
    build="now",
    lengths="auto",
    autotune=False,
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither this process's environment nor what these tests put there leaks."""
    for name in (*config.VARIABLES, DP_WORKSPACE_LIMIT):
        monkeypatch.delenv(name, raising=False)
    config.settings.cache_clear()
    yield
    config.settings.cache_clear()


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (None, None),
        (0, 0),
        (123, 123),
        ("0", 0),
        ("4096", 4096),
        (" 64 MiB ", 64 * 2**20),
        ("64mib", 64 * 2**20),
        ("1.5KiB", 1536),
        ("2kB", 2000),
        ("2MB", 2 * 10**6),
        ("3GB", 3 * 10**9),
        ("1GiB", 2**30),
        ("7B", 7),
    ],
)
def test_sizes(value: int | str | None, count: int | None) -> None:
    assert config.parse_bytes(value) == count


@pytest.mark.parametrize("value", ["", "-1", "MiB", "64 Mb it", "1e6", "64XB", "0x10", "1,5MB"])
def test_texts_that_are_no_size(value: str) -> None:
    with pytest.raises(ValueError, match=r"^limit must be a number of bytes .*KiB, MiB") as caught:
        config.parse_bytes(value, "limit")
    assert str(caught.value).endswith(f"got {value!r}")


def test_negative_sizes() -> None:
    with pytest.raises(ValueError, match=r"^workspace_limit must not be negative, got -1$"):
        config.parse_bytes(-1)


@pytest.mark.parametrize("value", [True, 1.5, b"1"])
def test_sizes_of_other_types(value: object) -> None:
    with pytest.raises(TypeError, match="workspace_limit must be an int, a str") as caught:
        config.parse_bytes(value)
    assert str(caught.value).endswith(f"got {value!r}")


def test_defaults() -> None:
    assert config.settings() == DEFAULTS


@pytest.mark.parametrize("name", [ENABLED, DISABLED])
@pytest.mark.parametrize(
    ("value", "on"),
    [(v, True) for v in ("1", "true", "YES", " on ")]
    + [(v, False) for v in ("0", "", "False", "no", "off", " ")],
)
def test_switches(monkeypatch: pytest.MonkeyPatch, name: str, value: str, on: bool) -> None:
    monkeypatch.setenv(name, value)
    given = {"enabled" if name == ENABLED else "disabled": on}
    assert config.settings() == dataclasses.replace(DEFAULTS, **given)


@pytest.mark.parametrize(
    ("name", "value", "field", "found"),
    [
        (CACHE_DIR, "/srv/plans", "cache_dir", Path("/srv/plans")),
        (CACHE_DIR, " ~/plans ", "cache_dir", Path.home() / "plans"),
        (CACHE_DIR, "off", "cache_dir", None),
        (CACHE_DIR, "OFF", "cache_dir", None),
        (CACHE_DIR, "0", "cache_dir", None),
        (CACHE_DIR, "none", "cache_dir", None),
        (CACHE_BYTES, "64MiB", "cache_bytes", 64 * 2**20),
        (CACHE_BYTES, "0", "cache_bytes", 0),
        (PLANS, "/a", "plans", (Path("/a"),)),
        (PLANS, os.pathsep.join(["/a", "", "b/c"]), "plans", (Path("/a"), Path("b/c"))),
        (RECORD, "calls.jsonl", "record", "calls.jsonl"),
        (RECORD, "calls/", "record", "calls/"),
        (BUILD, "now", "build", "now"),
        (BUILD, " Background ", "build", "background"),
        (BUILD, "never", "build", "never"),
        (LENGTHS, "auto", "lengths", "auto"),
        (LENGTHS, "exact", "lengths", "exact"),
        (LENGTHS, " Bucketed ", "lengths", "bucketed"),
    ],
)
def test_values(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, field: str, found: object
) -> None:
    monkeypatch.setenv(name, value)
    assert config.settings() == dataclasses.replace(DEFAULTS, **{field: found})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (DISABLED, "2", "TORCH_CUDNN_MHA_DISABLED must be 0 or 1, got '2'"),
        (DISABLED, "maybe", "TORCH_CUDNN_MHA_DISABLED must be 0 or 1, got 'maybe'"),
        (WORKSPACE_LIMIT, "lots", "TORCH_CUDNN_MHA_WORKSPACE_LIMIT must be a number of bytes"),
        (CACHE_SIZE, "0", "TORCH_CUDNN_MHA_CACHE_SIZE must be a whole number of at least 1"),
        (CACHE_SIZE, "-3", "TORCH_CUDNN_MHA_CACHE_SIZE must be a whole number of at least 1"),
        (CACHE_SIZE, "1.5", "TORCH_CUDNN_MHA_CACHE_SIZE must be a whole number of at least 1"),
        (CACHE_SIZE, "x", "TORCH_CUDNN_MHA_CACHE_SIZE must be a whole number of at least 1"),
        (ENABLED, "2", "TORCH_CUDNN_MHA_ENABLED must be 0 or 1, got '2'"),
        (CACHE_BYTES, "all", "TORCH_CUDNN_MHA_CACHE_BYTES must be a number of bytes"),
        (LENGTHS, "some", "TORCH_CUDNN_MHA_LENGTHS must be one of auto, exact, bucketed, got"),
        (BUILD, "later", "TORCH_CUDNN_MHA_BUILD must be one of now, background, never, got"),
    ],
)
def test_values_that_mean_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        config.settings()
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith(f"got {value!r}")


def test_settings_are_read_once_and_reloaded_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    before = config.settings()
    monkeypatch.setenv(WORKSPACE_LIMIT, "2MiB")
    monkeypatch.setenv(CACHE_SIZE, "7")
    monkeypatch.setenv(DISABLED, "1")
    assert config.settings() is before
    changed = {"disabled": True, "workspace_limit": 2 * 2**20, "cache_size": 7}
    assert config.reload() == dataclasses.replace(DEFAULTS, **changed)
    assert config.settings() == config.reload()


def test_a_bad_value_is_no_setting_and_can_be_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_SIZE, "none")
    with pytest.raises(ValueError, match=CACHE_SIZE):
        config.settings()
    monkeypatch.setenv(CACHE_SIZE, "3")
    assert config.settings().cache_size == 3


def test_empty_values_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in config.VARIABLES:
        monkeypatch.setenv(name, "")
    assert config.settings() == DEFAULTS


def test_plan_environment_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.plan_environment() == ("",)
    monkeypatch.setenv(DP_WORKSPACE_LIMIT, "1024")
    assert config.plan_environment() == ("1024",)


def test_the_readme_has_the_table() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    _, _, rest = readme.partition("<!-- `python -m cudnn_mha.config` -->\n\n")
    assert rest.partition("\n\n<!-- end of variables -->")[0] == config.table()


def test_the_table_has_a_row_for_each_variable() -> None:
    head, rule, *rows = config.table().splitlines()
    assert (head, rule) == ("| variable | meaning |", "| --- | --- |")
    assert [row.split("`")[1] for row in rows] == [*config.VARIABLES]
    assert f"| `{config.CACHE_BYTES}` | most bytes in it (default `1GiB`)" in config.table()
    assert all(row.count("|") == 3 for row in rows)  # no text breaks its row


def test_versions_in_words() -> None:
    assert config.version_text(91900) == "9.19.0"
    assert config.version_text(92401) == "9.24.1"
    assert config.version_text(100203) == "10.2.3"


def test_every_variable_is_documented() -> None:
    names = {value for name, value in vars(config).items() if str(value).startswith("TORCH_CUDNN")}
    assert set(config.VARIABLES) == names
    assert len(names) == 11
    assert all(config.VARIABLES.values())
