"""Writes down which calls a program makes, so that their plans can be compiled before the next run.

One line of JSON for each distinct graph, as `AttentionSpec.to_dict` has it, without what is only a
remedy for the GPU at hand: another GPU may need others. Each line is written at once and whole, so
several processes may share a file; given a folder, each writes a file of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from cudnn_mha import config
from cudnn_mha.cache import plans
from cudnn_mha.spec import AttentionSpec, TensorSpec

logger = logging.getLogger("cudnn_mha")


class Recorder:
    """Writes each distinct spec once.

    Args:
        path: a file, which is made or appended to; or a folder, which exists or ends with ``/``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._given = os.fspath(path)
        self.began = time.time()
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self.path = Path(self._given).expanduser()
        if self._given.endswith(os.sep) or self.path.is_dir():
            self.path = self.path / f"{socket.gethostname()}-{self._process}.jsonl"
        self._seen: set[AttentionSpec] = set()
        self._lock = threading.Lock()
        self._failed = False

    def note(self, spec: AttentionSpec) -> None:
        """Writes the spec if it is new; a disk that takes no more costs one warning."""
        if self._process != os.getpid():
            self._start()  # a forked process writes for itself
        spec = dataclasses.replace(spec, padding=False)
        with self._lock:
            if self._failed or spec in self._seen:
                return
            self._seen.add(spec)
            line = json.dumps(spec.to_dict()).encode() + b"\n"
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # One write in append mode: lines of several processes do not mix.
                with open(self.path, "ab", buffering=0) as file:
                    file.write(line)
            except OSError as error:
                self._failed = True
                logger.warning("calls are not recorded in %s: %s", self.path, error)

    def end(self) -> None:
        """Warns where nothing was recorded, by this process or by another in the same place."""
        if self._seen or self._process != os.getpid():
            return
        place = Path(self._given).expanduser()
        files = place.glob("*.jsonl") if self.path != place else [place]
        for file in files:
            with contextlib.suppress(OSError):
                if file.stat().st_mtime >= self.began:
                    return
        logger.warning(
            "no call was recorded, and %s was not written: no call reached cuDNN. Either the "
            "tensors are on no CUDA GPU, or no call goes through cudnn_mha (call cudnn_sdpa, or "
            "set %s=1), or cuDNN serves none of them (cudnn_mha.explain says why)",
            self.path,
            config.ENABLED,
        )


_recorders: list[Recorder] = []
_of_environment: dict[str, Recorder] = {}
_loaded_at, _loaded_by = time.time(), os.getpid()


@atexit.register
def _end_of_environment() -> None:
    """Ends the recording of the environment, whose recorder is made by the first call only."""
    path = os.environ.get(config.RECORD)
    # Processes that others started for a part of the work need no call, nor do commands.
    started = multiprocessing.parent_process() is not None or _loaded_by != os.getpid()
    if not path or started or "cudnn_mha.cli" in sys.modules:
        return
    recorder = _of_environment.get(path) or Recorder(path)
    recorder.began = _loaded_at
    recorder.end()


def note(spec: AttentionSpec) -> None:
    """Writes the spec wherever calls are recorded now."""
    path = config.settings().record
    if path is not None:
        if path not in _of_environment:
            _of_environment[path] = Recorder(path)
        _of_environment[path].note(spec)
    for recorder in tuple(_recorders):
        recorder.note(spec)


@contextlib.contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records every distinct call of the process while the ``with`` block runs.

    Calls of before are recorded again; their plans stay. A block without a call that cuDNN could
    serve writes nothing and logs a warning.

    Args:
        path: a file, which is made or appended to; or a folder (one that exists, or a text that
            ends with ``/``), in which every process writes a file of its own.
    """
    recorder = Recorder(path)
    _recorders.append(recorder)
    plans.forget_kept()  # a call is seen when it is decided, and that is remembered
    try:
        yield
    finally:
        _recorders.remove(recorder)
        recorder.end()


def read(paths: Iterable[str | os.PathLike[str]]) -> list[AttentionSpec]:
    """The distinct specs of recordings, in their order.

    Args:
        paths: files, or folders with files that end with ``.jsonl``.

    Raises:
        ValueError: a line is none that a recording has; names file and line.
        OSError: a file cannot be read.
    """
    found: dict[AttentionSpec, None] = {}
    for given in paths:
        path = Path(given).expanduser()
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        for file in files:
            for number, line in enumerate(file.read_bytes().splitlines(), 1):
                if not line.strip():
                    continue
                try:
                    found[_parsed(line)] = None
                except ValueError as error:
                    raise ValueError(f"{file}, line {number}: {error}") from error
    return list(found)


def _parsed(line: bytes) -> AttentionSpec:
    data = json.loads(line.decode())
    if not isinstance(data, dict):
        raise ValueError("it is no object")
    spec = AttentionSpec.from_dict(data)
    needed = ["query", "key", "value", "output"]
    if spec.backward:
        needed += [f"grad_{name}" for name in ("output", "query", "key", "value")]
    optional = ("bias", "grad_bias", "page_table")
    for name in needed + [n for n in optional if getattr(spec, n) is not None]:
        layout = getattr(spec, name)
        if not isinstance(layout, TensorSpec) or [len(part) for part in layout[:2]] != [4, 4]:
            raise ValueError(f"{name} must have a shape and a stride of 4 numbers, got {layout!r}")
    # A file written by hand may have 1 for 1.0, which would be the key of another plan.
    numbers = {name: float(getattr(spec, name)) for name in ("scale", "dropout_p", "softcap")}
    return dataclasses.replace(spec, **numbers)  # type: ignore[arg-type]
