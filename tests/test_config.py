"""Environment variables and sizes in words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cudnn_mha import config
from cudnn_mha.config import CACHE_SIZE, DISABLED, DP_WORKSPACE_LIMIT, WORKSPACE_LIMIT, Settings


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
    assert config.settings() == Settings(disabled=False, workspace_limit=None, cache_size=1024)


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_disabled(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(DISABLED, value)
    assert config.settings().disabled is True


@pytest.mark.parametrize("value", ["0", "", "False", "no", "off", " "])
def test_not_disabled(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(DISABLED, value)
    assert config.settings().disabled is False


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
    assert config.reload() == Settings(disabled=True, workspace_limit=2 * 2**20, cache_size=7)
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
    assert config.settings() == Settings(disabled=False, workspace_limit=None, cache_size=1024)


def test_plan_environment_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.plan_environment() == ("",)
    monkeypatch.setenv(DP_WORKSPACE_LIMIT, "1024")
    assert config.plan_environment() == ("1024",)


def test_versions_in_words() -> None:
    assert config.version_text(91900) == "9.19.0"
    assert config.version_text(92401) == "9.24.1"
    assert config.version_text(100203) == "10.2.3"


def test_every_variable_is_documented() -> None:
    assert set(config.VARIABLES) == {DISABLED, WORKSPACE_LIMIT, CACHE_SIZE}
    assert all(config.VARIABLES.values())
