"""Runs one case on the GPU and times its peers in turns.

Device time is taken by CUDA events around several calls that wait behind other work, so that gaps
of the host do not count; the forward without gradients, the backward by ``torch.autograd.grad``.
Host time is what calls of a tiny shape take until they return, the GPU keeping up. The peers take
turns within each round, in an order that rotates, so that what disturbs the machine disturbs all
of them; ratios are taken round by round.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.cases import PEERS, Case, Direction, Row, Timing
from benchmarks.data import Data, make_data
from benchmarks.peers import RefusedError, only, prepare, words
from cudnn_mha import __version__, config

DEVICE_SAMPLE = 2e-3
HOST_SAMPLE = 5e-3
LEAST_ROUNDS = 9
MOST_CALLS = 100
PREPARATION = 15
"""How often a case's seconds a peer may take to prepare in all, such as to compile its kernels."""

AWAITED = ("ours", "cudnn", "flex")
"""Who may take longer."""

_preparing = dict.fromkeys(PEERS, 0.0)

Turn = list[tuple[str, int]]
Measured = Mapping[str, tuple[float, bool]]
Clock = Callable[[Turn], Measured]


def schedule(
    call_seconds: Mapping[str, float], *, budget: float, repeats: int, sample: float
) -> list[Turn]:
    """Who makes how many calls in each round.

    Args:
        call_seconds: rough time of one call of each peer.
        budget: seconds for all rounds; `LEAST_ROUNDS` are made all the same.
        repeats: most rounds.
        sample: seconds that one peer's calls in one round should take.

    Peers so slow that a single call outlasts the others' rounds only join every fourth.
    """
    calls = {n: max(1, min(MOST_CALLS, round(sample / s))) for n, s in call_seconds.items()}
    cost = {n: calls[n] * s for n, s in call_seconds.items()}
    every = {n: 4 if c > 4 * min(cost.values()) else 1 for n, c in cost.items()}
    mean = sum(cost[n] / every[n] for n in cost)
    rounds = min(repeats, max(LEAST_ROUNDS, int(budget / mean)))
    names = list(calls)
    turns = []
    for r in range(rounds):
        first = r % len(names)
        order = names[first:] + names[:first]
        turns.append([(n, calls[n]) for n in order if r % every[n] == 0])
    return turns


def interleave(
    turns: Sequence[Turn], clock: Callable[[Turn], Mapping[str, tuple[float, bool]]]
) -> dict[str, Timing]:
    """Times every turn.

    Args:
        turns: from `schedule`.
        clock: runs one turn and gives each peer's milliseconds of all its calls, and whether the
            GPU may have waited for the host.
    """
    timings = {name: Timing([], calls) for turn in turns for name, calls in turn}
    late = dict.fromkeys(timings, 0)
    for turn in turns:
        measured = clock(turn)
        for name, timing in timings.items():
            milliseconds, waited = measured.get(name, (None, False))
            per_call = None if milliseconds is None else milliseconds / timing.calls
            timing.milliseconds.append(per_call)
            late[name] += waited
    for name, timing in timings.items():
        timing.late = late[name] / sum(m is not None for m in timing.milliseconds)
    return timings


def device_clock(steps: Mapping[str, Callable[[], object]], direction: Direction) -> Clock:
    """Times turns by CUDA events, each turn behind a matrix product that the host runs ahead of."""
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(matrix)
    event: Any = torch.cuda.Event

    def clock(turn: Turn) -> Measured:
        marks = {}
        torch.mm(matrix, matrix, out=product)
        for name, calls in turn:
            start, end = (event(enable_timing=True) for _ in range(2))
            with only(name, direction):
                start.record()
                for _ in range(calls):
                    steps[name]()
                # Where the GPU has come this far already, it may have waited for the host.
                late = start.query()
                end.record()
            marks[name] = start, end, late
        torch.cuda.synchronize()
        return {n: (start.elapsed_time(end), late) for n, (start, end, late) in marks.items()}

    return clock


def host_clock(steps: Mapping[str, Callable[[], object]], direction: Direction) -> Clock:
    """Times turns on the host, the GPU idle before each peer's calls."""

    def clock(turn: Turn) -> Measured:
        measured = {}
        for name, calls in turn:
            step = steps[name]
            with only(name, direction):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    step()
                end = time.perf_counter()
            measured[name] = (end - start) * 1e3, False
        torch.cuda.synchronize()
        return measured

    return clock


def run_case(case: Case, seconds: float, repeats: int) -> list[Row]:
    """Checks and times every direction; a failure becomes a row that says so.

    Args:
        case: what to run.
        seconds: for the rounds of all directions together.
        repeats: most rounds for each direction.
    """
    rows: list[Row] = []
    data = None
    for direction in case.directions:
        try:
            if data is None:
                data = make_data(case)
            rows.append(_run(case, direction, data, seconds, repeats))
        except Exception as error:
            rows.append(Row(case, direction, failure=words(error)))
    return rows


def _run(case: Case, direction: Direction, data: Data, seconds: float, repeats: int) -> Row:
    row = Row(case, direction)
    steps = {}
    errors = {}
    for name in case.peers:
        start = time.perf_counter()
        try:
            if _preparing[name] > PREPARATION * seconds and name not in AWAITED:
                raise RefusedError("sits out: its preparation takes too long")
            steps[name], errors[name] = prepare(name, case, direction, data)
        except Exception as error:
            row.refused[name] = words(error)
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # nothing runs on this GPU any more
                raise RuntimeError(f"{PEERS[name]}: {words(error)}") from error
        _preparing[name] += time.perf_counter() - start
    if not steps:
        return row
    clock = (host_clock if case.host else device_clock)(steps, direction)
    sample = HOST_SAMPLE if case.host else DEVICE_SAMPLE
    with _no_collection():
        for name in steps:  # warm-up
            clock([(name, 2)])
        rough = {name: clock([(name, 3)])[name][0] / 3e3 for name in steps}
        share = seconds / len(case.directions)
        turns = schedule(rough, budget=share, repeats=repeats, sample=sample)
        row.timings = interleave(turns, clock)
    for name, timing in row.timings.items():
        timing.error = errors[name]
    return row


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def usable() -> bool:
    """Whether the GPU still works in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def environment() -> dict[str, str] | None:
    """What the numbers were measured on; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    cudnn: Any = torch.backends.cudnn
    return {
        "GPU": f"{device.name}, sm {device.major}.{device.minor}, "
        f"{device.multi_processor_count} SMs, L2 {device.L2_cache_size / 2**20:.0f} MiB",
        "driver": _driver(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "cuDNN": config.version_text(cudnn.version() or 0),
        "frontend": _version("nvidia-cudnn-frontend"),
        "FlashAttention-4": _version("flash-attn-4"),
        "cudnn_mha": __version__,
        "Python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split()[0] if done.stdout.strip() else "unknown"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
