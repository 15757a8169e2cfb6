"""Plans on disk: what one process compiled, the next one loads.

One file holds one plan, or one refusal by cuDNN. Its name is a hash of everything that the plan
depends on: the spec, the GPU, the workspace limit, the versions of cuDNN, of its frontend and of
this format. A file is only ever written whole, under another name first, so any number of
processes may share a folder. Whatever does not have the right form, checksum and key is ignored
and replaced.

A plan is native code that a GPU runs, so a folder or a file that another user could have written
is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cudnn_mha.checks import Kind, Reason
from cudnn_mha.config import version_text
from cudnn_mha.devices import Device
from cudnn_mha.spec import AttentionSpec

logger = logging.getLogger("cudnn_mha")

FORMAT = 2
"""Counts up when files of before can no longer be read as they are."""

SUFFIX = ".plan"
TOUCH_AFTER = 600.0
"""Seconds after which another use of a file is worth writing down."""

ABANDONED_AFTER = 3600.0
"""Seconds after which nobody is still writing a file."""

_PART = ".part"
_MAGIC = b"cudnn_mha plan\n"
_FOREIGN_WRITERS = stat.S_IWGRP | stat.S_IWOTH


class PlanKey(NamedTuple):
    """Everything that a compiled plan depends on."""

    spec: AttentionSpec
    device: Device
    workspace_limit: int | None
    cudnn_version: int
    frontend_version: str
    environment: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON, without what differs between two GPUs of one kind."""
        return {
            "format": FORMAT,
            "spec": self.spec.to_dict(),
            "gpu": gpu_facts(self.device),
            "workspace_limit": self.workspace_limit,
            "cudnn": version_text(self.cudnn_version),
            "frontend": self.frontend_version,
            "environment": list(self.environment),
        }


def gpu_facts(device: Device) -> dict[str, Any]:
    """What of a GPU a plan depends on, the same for a described one and for the card."""
    return {"name": device.name, "sm": device.sm, "multiprocessors": device.multiprocessors}


_KEY_FIELDS = {"format", "spec", "gpu", "workspace_limit", "cudnn", "frontend", "environment"}


class BadFileError(Exception):
    """A file that holds no plan that can be used; says why."""


class UntrustedError(BadFileError, PermissionError):
    """A file or folder that another user could have written."""


@dataclass(frozen=True)
class Entry:
    """What one file holds.

    Attributes:
        key: `PlanKey.to_dict` of what it is for.
        engine: cuDNN's name of the engine; None for a refusal.
        workspace: bytes of scratch device memory; None for a refusal.
        refusal: why cuDNN has no plan.
        blob: the plan, as cuDNN's frontend serialized it; empty for a refusal.
    """

    key: Mapping[str, Any]
    engine: str | None = None
    workspace: int | None = None
    refusal: Reason | None = None
    blob: bytes = b""

    def to_bytes(self) -> bytes:
        """The content of the file."""
        header = {"key": self.key, "engine": self.engine, "workspace": self.workspace}
        header["refusal"] = None if self.refusal is None else dataclasses.asdict(self.refusal)
        body = _canonical(header) + b"\n" + self.blob
        return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, content: bytes) -> Entry:
        """What a file holds.

        Raises:
            BadFileError: it is truncated, corrupted or something else.
        """
        if not content.startswith(_MAGIC):
            raise BadFileError("it is no plan of cudnn_mha")
        checksum, _, body = content[len(_MAGIC) :].partition(b"\n")
        if checksum != hashlib.sha256(body).hexdigest().encode():
            raise BadFileError("its checksum does not match: it is truncated or corrupted")
        line, _, blob = body.partition(b"\n")
        try:
            header = json.loads(line)
            refusal = header["refusal"]
            if refusal is not None:
                kind = Kind(refusal["kind"])
                refusal = Reason(str(refusal["rule"]), str(refusal["message"]), kind)
            found = cls(header["key"], header["engine"], header["workspace"], refusal, blob)
            format = found.key["format"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadFileError(f"its header is not understood ({error!r})") from error
        if format != FORMAT:
            raise BadFileError(f"it has format {format}, this version reads {FORMAT}")
        return found

    @property
    def spec(self) -> AttentionSpec:
        """The graph that it is for."""
        return AttentionSpec.from_dict(self.key["spec"])

    @property
    def gpu(self) -> str:
        """The name of the GPU that it is for."""
        return str(self.key["gpu"]["name"])


class Found(NamedTuple):
    """One file of a folder; ``entry`` is None where ``problem`` says why."""

    path: Path
    size: int
    used: float
    entry: Entry | None
    problem: str | None

    @property
    def name(self) -> str:
        """What the file is called without its suffix."""
        return self.path.name.removesuffix(SUFFIX)


class Store:
    """A folder of plans.

    Args:
        folder: where; made when something is first written.
        max_bytes: least recently used files go once the folder is larger; None keeps all.
        read_only: nothing is written, touched or removed.
    """

    def __init__(
        self, folder: Path, max_bytes: int | None = None, *, read_only: bool = False
    ) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._written = 0
        self._swept = False
        self._lock = threading.Lock()
        self._warned = False

    def __str__(self) -> str:
        return str(self.folder)

    def path(self, key: Mapping[str, Any]) -> Path:
        """Where the plan of a `PlanKey.to_dict` is kept."""
        digest = hashlib.sha256(_canonical(key)).hexdigest()[:40]
        return self.folder / digest[:2] / f"{digest}{SUFFIX}"

    def load(self, key: Mapping[str, Any]) -> Entry | None:
        """The entry of a key; None where there is none that can be used."""
        path = self.path(key)
        try:
            content, used = self._read(path)
            entry = Entry.from_bytes(content)
            if entry.key != key:
                raise BadFileError("it is for another call")
        except FileNotFoundError:
            return None
        except (BadFileError, OSError) as error:
            self._ignore(path, error)
            return None
        if not self.read_only and time.time() - used > TOUCH_AFTER:
            with contextlib.suppress(OSError):
                os.utime(path)
        return entry

    def save(self, entry: Entry) -> bool:
        """Writes an entry; whether that was possible."""
        if self.read_only:
            return False
        try:
            self.write(entry)
        except OSError as error:
            self._warn(f"plans are not kept in {self.folder}: {error}")
            return False
        return True

    def write(self, entry: Entry) -> None:
        """Writes an entry.

        Raises:
            OSError: it cannot be written, or another user could change it.
        """
        path = self.path(entry.key)
        content = entry.to_bytes()
        self.make()
        self._make(path.parent)
        write_whole(path, content)
        self._make_room(len(content))

    def make(self) -> None:
        """Makes the folder, if need be.

        Raises:
            OSError: it cannot be made, or another user could change what is in it.
        """
        self._make(self.folder)

    def problem(self) -> str | None:
        """Why nothing in the folder can be used; None where it can, or is still to be made."""
        try:
            facts = self.folder.stat()
            if not stat.S_ISDIR(facts.st_mode):
                return f"{self.folder} is no folder"
            if not os.access(self.folder, os.R_OK | os.X_OK):
                return f"{self.folder} cannot be read by this user"
            _require_own(self.folder, facts)
        except FileNotFoundError:
            return None
        except UntrustedError as error:
            return str(error)
        except OSError as error:
            return f"{self.folder} cannot be read ({error.strerror})"
        return None

    def discard(self, key: Mapping[str, Any], why: str) -> None:
        """Removes an entry that turned out to be of no use."""
        self._ignore(self.path(key), BadFileError(why))

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """Every plan's file, least recently used first."""
        found = []
        for path in self._glob(f"??/*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process removed it
                found.append((path, path.stat()))
        return sorted(found, key=lambda one: one[1].st_mtime)

    def inspect(self) -> Iterator[Found]:
        """Every file, read and checked, least recently used first."""
        for path, facts in self.files():
            entry = problem = None
            try:
                content, _ = self._read(path)
                entry = Entry.from_bytes(content)
                if self.path(entry.key) != path:
                    raise BadFileError("its name is not that of its key")
                _require_form(entry)
            except (BadFileError, OSError) as error:
                entry, problem = None, str(error)
            yield Found(path, facts.st_size, facts.st_mtime, entry, problem)

    def clear(self) -> tuple[int, int]:
        """Removes every file; how many and how many bytes that were."""
        count = size = 0
        for path, facts in self.files():
            with contextlib.suppress(OSError):
                path.unlink()
                count += 1
                size += facts.st_size
        self._remove_parts(0)
        return count, size

    def _glob(self, pattern: str) -> list[Path]:
        try:
            return list(self.folder.glob(pattern))
        except OSError:  # `problem` says why
            return []

    def _read(self, path: Path) -> tuple[bytes, float]:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            _require_own(path, facts)
            self._require_own(self.folder)
            self._require_own(path.parent)
            return file.read(), facts.st_mtime

    def _make(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_own(folder)

    def _require_own(self, folder: Path) -> None:
        _require_own(folder, folder.stat())

    def _ignore(self, path: Path, error: Exception) -> None:
        if isinstance(error, UntrustedError):
            self._warn(f"stored plans are ignored: {error}")
            return
        logger.info("the stored plan %s is ignored: %s", path, error)
        if isinstance(error, BadFileError) and not self.read_only:
            with contextlib.suppress(OSError):
                path.unlink()

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s", message)

    def _make_room(self, written: int) -> None:
        """Removes files, but looks through the folder only now and then."""
        if self.max_bytes is None:
            return
        with self._lock:
            self._written += written
            if self._swept and self._written < self.max_bytes // 32:
                return
            self._swept, self._written = True, 0
        self._remove_parts(ABANDONED_AFTER)
        files = self.files()
        surplus = sum(facts.st_size for _, facts in files) - self.max_bytes
        for path, facts in files:
            if surplus <= 0:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            surplus -= facts.st_size

    def _remove_parts(self, age: float) -> None:
        """Removes what processes that were killed had begun to write."""
        for path in self._glob(f"??/.*{_PART}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= age:
                    path.unlink()


def _require_form(entry: Entry) -> None:
    """Raises `BadFileError` for a key that no `PlanKey` makes, whatever its checksum."""
    try:
        missing = _KEY_FIELDS - entry.key.keys()
        if missing:
            raise ValueError(f"without {', '.join(sorted(missing))}")
        str(entry.spec)
        str(entry.gpu)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFileError(f"its key is not understood ({error})") from error


def _require_own(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid not in (os.getuid(), 0):
        raise UntrustedError(
            f"{path} belongs to user {facts.st_uid}, and a plan is native code; use a folder of "
            "your own"
        )
    if facts.st_mode & _FOREIGN_WRITERS:
        raise UntrustedError(
            f"{path} can be written by other users, and a plan is native code; "
            f"`chmod -R go-w {path}`"
        )


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that nobody ever sees a part of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=_PART)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
