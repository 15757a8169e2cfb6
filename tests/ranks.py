"""Processes of one process group, which live on from test to test: starting them takes seconds."""

from __future__ import annotations

import faulthandler
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SECONDS = 120
_device = torch.device("cpu")


class Ranks:
    """One process for each device; they start with the first call.

    Args:
        backend: of the process group.
        devices: one for each rank.
    """

    def __init__(self, backend: str, devices: tuple[str, ...]) -> None:
        self._backend, self._devices = backend, devices
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` returns on every rank; it must be a function of a module.

        Raises:
            AssertionError: it raised on some rank, or is not done in time; holds the traceback.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + SECONDS
        while len(answers) < len(self._pipes):
            for rank, pipe in enumerate(self._pipes):
                if rank in answers or not pipe.poll(0.01):
                    continue
                try:
                    done, answers[rank] = pipe.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    done, answers[rank] = False, f"the process died with exit code {code}"
                if not done:  # others may wait for this one forever
                    self._stop()
                    raise AssertionError(f"rank {rank}: {answers[rank]}")
            if time.monotonic() > deadline:
                self._stop()
                raise AssertionError(f"not done in {SECONDS} s")
        return [answers[rank] for rank in range(len(self._pipes))]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store")
        context = mp.get_context("spawn")
        for rank in range(len(self._devices)):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._backend, self._devices, store, there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None


def _serve(
    rank: int, backend: str, devices: tuple[str, ...], store: Path, pipe: Connection
) -> None:
    faulthandler.enable()  # a rank that crashes says where
    torch.set_num_threads(1)
    global _device
    _device = torch.device(devices[rank])
    if _device.type == "cuda":
        torch.cuda.set_device(_device)
        torch.cuda.init()  # else a mesh takes the GPU of the rank's number
    dist.init_process_group(
        backend,
        init_method=store.as_uri(),
        rank=rank,
        world_size=len(devices),
        timeout=timedelta(seconds=SECONDS),
        device_id=_device if backend == "nccl" else None,
    )
    while True:
        function, args = pipe.recv()
        torch.manual_seed(0)
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def device() -> torch.device:
    """Where this rank computes."""
    return _device


def mesh(*shape: int) -> DeviceMesh:
    """All ranks, by default in one dimension."""
    return init_device_mesh(_device.type, shape or (dist.get_world_size(),))
