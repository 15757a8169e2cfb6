"""Every environment variable of the package, read in one place.

A variable is read when the package first needs it and kept: changing the environment of a running
process has no effect until `reload()`. ``python -m cudnn_mha.config`` prints their table.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_FRONTEND = (1, 28)
"""The oldest nvidia-cudnn-frontend that the tests run on."""

MIN_CUDNN = 91900
"""The oldest cuDNN that the tests run on, as cuDNN counts: 9.19.0."""

ENABLED = "TORCH_CUDNN_MHA_ENABLED"
DISABLED = "TORCH_CUDNN_MHA_DISABLED"
WORKSPACE_LIMIT = "TORCH_CUDNN_MHA_WORKSPACE_LIMIT"
CACHE_SIZE = "TORCH_CUDNN_MHA_CACHE_SIZE"
CACHE_DIR = "TORCH_CUDNN_MHA_CACHE_DIR"
CACHE_BYTES = "TORCH_CUDNN_MHA_CACHE_BYTES"
PLANS = "TORCH_CUDNN_MHA_PLANS"
RECORD = "TORCH_CUDNN_MHA_RECORD"
BUILD = "TORCH_CUDNN_MHA_BUILD"

LENGTHS = "TORCH_CUDNN_MHA_LENGTHS"
AUTOTUNE = "TORCH_CUDNN_MHA_AUTOTUNE"

LENGTH_MODES = ("auto", "exact", "bucketed")
BUILD_MODES = ("now", "background", "never")

VARIABLES = {
    ENABLED: "`1` serves PyTorch's own cuDNN attention, from `import torch` on",
    DISABLED: "`1` keeps cuDNN out of every call and wins over everything else",
    WORKSPACE_LIMIT: (
        "most device memory that one call may use as workspace: bytes, or text such as `64MiB`; "
        "plans that need more are not used (default: no limit)"
    ),
    CACHE_SIZE: "how many compiled plans are kept in memory (default `1024`)",
    CACHE_DIR: (
        "folder of the plans on disk, or `off` (default: `cudnn_mha` in the user's cache folder)"
    ),
    CACHE_BYTES: "most bytes in it (default `1GiB`); least recently used plans go first",
    PLANS: "folders of plans compiled ahead of time, separated as in `PATH`; they are only read",
    RECORD: (
        "file to which every distinct call is written, a line of JSON each; in a folder, each "
        "process writes a file of its own"
    ),
    LENGTHS: (
        "lengths that plans are made for: `exact`, each its own; `bucketed`, one plan for all up "
        "to the next power of two, where that is exact; `auto` (default), that once a few lengths "
        "were met"
    ),
    AUTOTUNE: "`1` times all of cuDNN's plans for a call and keeps the fastest, on disk too",
    BUILD: (
        "when a plan that is not there is compiled: `now` (default), `background` (PyTorch "
        "computes until it is there), `never`"
    ),
}
"""What each variable means, in Markdown. The README's table is `table` of it."""

# Read by cuDNN's frontend while it expands a graph, so a plan depends on it.
DP_WORKSPACE_LIMIT = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Settings:
    """The values in force."""

    enabled: bool
    disabled: bool
    workspace_limit: int | None
    cache_size: int
    cache_dir: Path | None
    cache_bytes: int | None
    plans: tuple[Path, ...]
    record: str | None
    build: str
    lengths: str
    autotune: bool


current: Settings | None = None
"""What `settings` last found, for code that compilers trace: they look into no cache."""


@functools.cache
def settings() -> Settings:
    """The environment's settings, parsed once.

    Raises:
        ValueError: a variable has a value that means nothing; the message names it.
    """
    global current
    current = Settings(
        enabled=_flag(ENABLED),
        disabled=_flag(DISABLED),
        workspace_limit=parse_bytes(os.environ.get(WORKSPACE_LIMIT) or None, WORKSPACE_LIMIT),
        cache_size=_count(CACHE_SIZE, 1024),
        cache_dir=_cache_dir(),
        cache_bytes=parse_bytes(os.environ.get(CACHE_BYTES) or "1GiB", CACHE_BYTES),
        plans=tuple(Path(p) for p in os.environ.get(PLANS, "").split(os.pathsep) if p),
        record=os.environ.get(RECORD) or None,
        build=_one_of(BUILD, BUILD_MODES),
        lengths=_one_of(LENGTHS, LENGTH_MODES),
        autotune=_flag(AUTOTUNE),
    )
    return current


def table() -> str:
    """Every variable and its meaning in Markdown; the table in the README is this one."""
    rows = [("variable", "meaning"), ("---", "---")]
    rows += [(f"`{name}`", meaning) for name, meaning in VARIABLES.items()]
    return "\n".join(f"| {name} | {meaning} |" for name, meaning in rows)


def reload() -> Settings:
    """Reads the environment anew."""
    settings.cache_clear()
    return settings()


def plan_environment() -> tuple[str, ...]:
    """What changes which plan is built for a spec, besides versions."""
    outside = os.environ.get(DP_WORKSPACE_LIMIT, "")
    return (outside, "autotuned") if settings().autotune else (outside,)


def version_text(version: int) -> str:
    """'9.19.0' from 91900."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def parse_bytes(value: int | str | None, name: str = "workspace_limit") -> int | None:
    """Bytes from a number or a text such as ``'64MiB'``; None stays None (no limit).

    Raises:
        ValueError: the value is negative or not of that form.
        TypeError: the value is neither a number nor a text.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be an int, a str such as '64MiB' or None, got {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{name} must be a number of bytes or a number with one of "
            f"B, kB, MB, GB, KiB, MiB, GiB, got {value!r}"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ValueError(f"{name} must be 0 or 1, got {os.environ[name]!r}")


def _cache_dir() -> Path | None:
    value = os.environ.get(CACHE_DIR, "").strip()
    if value.lower() in ("off", "0", "none"):
        return None
    if value:
        return Path(value).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("cudnn_mha")


def _one_of(name: str, allowed: Sequence[str]) -> str:
    value = os.environ.get(name, "").strip().lower() or allowed[0]
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {os.environ[name]!r}")
    return value


def _count(name: str, default: int) -> int:
    value = os.environ.get(name, "").strip()
    if not value:
        return default
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


if __name__ == "__main__":
    print(table())
