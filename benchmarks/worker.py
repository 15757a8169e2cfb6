"""Measures in a process of its own, so that a crash costs one case and not the run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.cases import Case, Row

PATIENCE = 180.0
"""Seconds after which a process that says nothing is taken for hung."""

Serve = Callable[[Connection], None]


class DiedError(Exception):
    """The process that measures ended, or hangs."""


class Worker:
    """A process that measures: what kills it costs one case and not the run.

    Args:
        serve: what it does with its end of the pipe.
    """

    def __init__(self, serve: Serve) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def tell(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            pass  # `hear` says what became of the process

    def hear(self, patience: float = PATIENCE) -> Any:
        """The next answer.

        Raises:
            DiedError: there will be none.
        """
        try:
            if self._pipe.poll(patience):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            raise DiedError(f"the process died with exit code {self._process.exitcode}") from None
        raise DiedError(f"no answer within {patience:g} s")

    def stop(self) -> None:
        """Lets it end by itself, and ends it where it does not."""
        self.tell(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def serve(pipe: Connection) -> None:
    """Says where it runs, then answers each case with its rows and whether the GPU still works."""
    from benchmarks import timing  # only here, where torch and a GPU are needed

    pipe.send(timing.environment())
    while (job := pipe.recv()) is not None:
        pipe.send((timing.run_case(*job), timing.usable()))


def run(
    cases: Sequence[Case],
    seconds: float,
    repeats: int,
    begin: Callable[[dict[str, str]], None],
    done: Callable[[list[Row]], None],
    serve: Serve = serve,
) -> bool:
    """Measures the cases, each failure on its own; False where there is no GPU.

    Args:
        cases: what to measure.
        seconds, repeats: for each case, as in `timing.run_case`.
        begin: told where it runs, once.
        done: told the rows of each case.
        serve: what the measuring process does.

    Raises:
        DiedError: the process does not even start.
    """
    worker: Worker | None = None
    begun = False
    try:
        for case in cases:
            usable = False
            try:
                if worker is None:
                    worker = Worker(serve)
                    environment = worker.hear()
                    if environment is None:
                        return begun
                    if not begun:
                        begin(environment)
                    begun = True
                worker.tell((case, seconds, repeats))
                rows, usable = worker.hear()
            except DiedError as error:
                if not begun:
                    raise
                rows = [Row(case, direction, failure=str(error)) for direction in case.directions]
            done(rows)
            if worker is not None and not usable:
                worker.stop()
                worker = None
    finally:
        if worker is not None:
            worker.stop()
    return True
