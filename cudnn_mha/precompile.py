"""Plans compiled before they are needed: for GPUs that are not here, or for this one at a start."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cudnn_mha import cache, checks, config, devices, padded, recording, runtime
from cudnn_mha.cache import Slot, plan_key, plans
from cudnn_mha.config import version_text
from cudnn_mha.devices import Device
from cudnn_mha.dispatch import SPLITTABLE
from cudnn_mha.inputs import (
    Options,
    backward_spec,
    forward_spec,
    outline,
    prepare,
    require_countable,
    split,
    validate,
    writable_output,
)
from cudnn_mha.plan import Refused, compile_plan
from cudnn_mha.routes import Given
from cudnn_mha.spec import AttentionSpec
from cudnn_mha.store import Store, gpu_facts
from cudnn_mha.terms import Terms

Progress = Callable[["Outcome"], None]


@dataclass(frozen=True)
class Outcome:
    """What became of one spec on one GPU.

    Attributes:
        gpu: its name.
        spec: the graph in words.
        engine: cuDNN's name of the engine; None where there is no plan.
        workspace: bytes of scratch device memory.
        size: bytes of the file.
        seconds: what compiling took; 0 for a plan that was there already.
        reasons: why there is no plan, in words.
    """

    gpu: str
    spec: str
    engine: str | None = None
    workspace: int | None = None
    size: int = 0
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Loaded:
    """What a folder of plans holds for this process.

    Attributes:
        folder: the folder.
        usable: plans and refusals for the versions and GPUs that are here.
        skipped: why others are of no use, and how many for each reason.
    """

    folder: str
    usable: int
    skipped: dict[str, int]

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.usable} usable, {sum(self.skipped.values())} skipped"]
        lines += [f"  {count} {reason}" for reason, count in self.skipped.items()]
        return "\n".join(lines)


def compile_ahead(
    specs: Iterable[AttentionSpec],
    gpus: Sequence[str],
    folder: str | os.PathLike[str],
    *,
    workspace_limit: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Compiles plans for described GPUs into a folder, in parallel processes. No GPU is needed.

    Args:
        specs: what to compile, such as `recording.read` gives.
        gpus: names of described GPUs, such as ``['h200', 'b200']``.
        folder: where the plans go; what is there already is kept.
        workspace_limit: as in the calls that will use the plans: it is part of what they look for.
        jobs: number of processes; None takes as many as there is work for, at most one for each
            core. They import the script that calls this, so it needs the usual
            ``if __name__ == "__main__"``.
        progress: called with each outcome as it comes.

    Raises:
        ValueError: a GPU that is not described; names those that are.
        CudnnUnavailableError: there is no cuDNN here.
        OSError: the folder cannot be written.
    """
    described = {gpu: devices.described(gpu) for gpu in gpus}
    runtime.library()
    path = Path(folder).expanduser()
    Store(path).make()
    given = list(specs)
    # Recordings of several GPUs may have a graph with a remedy and without it.
    tasks = [
        (spec, gpu, str(path), workspace_limit)
        for gpu, device in described.items()
        for spec in dict.fromkeys(checks.remedied(spec, device) for spec in given)
    ]
    # A process takes as long to start as it then takes for dozens of plans.
    count = min(jobs or min(_cores(), 1 + len(tasks) // 8), max(1, len(tasks)))
    # Spawned, not forked: the parent has threads of cuDNN's.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _end_with, (os.getpid(),)) as pool:
        return _all(pool, _compile_into, tasks, progress)


def warmup(
    specs: Iterable[AttentionSpec] | str | os.PathLike[str],
    *,
    device: int | None = None,
    workspace_limit: int | str | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Makes plans for a GPU of this machine ready, loaded or compiled, several at a time.

    Args:
        specs: what to make ready, or a recording to read it from.
        device: CUDA device index; None takes the current one.
        workspace_limit: as for `cudnn_sdpa`.
        jobs: number of threads; None takes one for each core.
        progress: called with each outcome as it comes.

    Raises:
        CudnnUnavailableError: there is no cuDNN here.
        RuntimeError: there is no GPU here.
        ValueError, OSError: the recording cannot be read.
    """
    if isinstance(specs, str | os.PathLike):
        specs = recording.read([specs])
    index = torch.cuda.current_device() if device is None else device
    if workspace_limit is None:
        workspace_limit = config.settings().workspace_limit
    limit = config.parse_bytes(workspace_limit)
    tasks = [(spec, devices.cuda(index), limit) for spec in specs]
    with ThreadPoolExecutor(jobs or _cores()) as pool:
        return _all(pool, _make_ready, tasks, progress)


def specs_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: Options,
    device: Device,
    *,
    gradient: bool,
) -> list[AttentionSpec]:
    """The graphs that a call of `cudnn_sdpa` looks up on a GPU, without remedies for that GPU.

    For a call that is computed in parts, those of every part. The gradient of the output is taken
    to have the output's own layout.

    Args:
        query, key, value, mask: tensors on ``meta``; no value is read.
        options: the call's other arguments.
        device: the GPU that the call is for.
        gradient: some gradient will be wanted.

    Raises:
        ValueError, TypeError, RuntimeError: as for `cudnn_sdpa`.
    """
    validate(query, key, value, mask, options)
    require_countable(query, key, value, mask, options)
    inputs = prepare(query, key, value, mask, options)
    output = writable_output(query, value) if inputs.are(query, key, value) else None
    scale = outline(query, value, options).scale
    lse = gradient or options.return_lse
    specs = [forward_spec(inputs, options, scale, lse=lse, output=output)]
    if gradient:
        specs.append(
            backward_spec(
                specs[0],
                specs[0].output,
                bias_gradient=mask is not None and mask.requires_grad,
                deterministic=options.deterministic,
            )
        )
    version = runtime.cudnn_version()
    found = [
        r.rule for s in specs for r in checks.check(checks.remedied(s, device), device, version)
    ]
    parts = split(query, key, value, mask) if found and SPLITTABLE.issuperset(found) else None
    if parts is None:
        return specs
    halves = [specs_of(*half, options, device, gradient=gradient) for half in parts.halves]
    return list(dict.fromkeys(itertools.chain(*halves)))


def extended_specs(
    given: Given, options: Options, terms: Terms, device: Device, *, gradient: bool
) -> list[AttentionSpec]:
    """`specs_of` for a call with arguments that PyTorch's function does not have.

    Args:
        given: tensors on ``meta``; no value is read.
        options, terms: the call's other arguments.
        device: the GPU that the call is for.
        gradient: some gradient will be wanted.

    Raises:
        ValueError, TypeError, RuntimeError: as for `cudnn_sdpa`; ValueError also where cuDNN has
            no graph for such tensors on any GPU.
    """
    validate(*given[:4], options)
    require_countable(*given[:4], options)
    padded.validate_given(given)
    route = padded.describe(given, options, terms, gradient, device)
    if not route.graphs:
        raise ValueError("; ".join(map(str, route.reasons)))
    # Remedies are those of this GPU, and come back when the plan is compiled.
    return [dataclasses.replace(spec, padding=False) for spec in route.graphs]


def load_plans(folder: str | os.PathLike[str]) -> Loaded:
    """Uses the plans of a folder, such as ``cudnn-mha compile`` fills, in this process.

    ``TORCH_CUDNN_MHA_PLANS`` does the same for a script that does not call this.

    Raises:
        FileNotFoundError: there is no such folder.
        CudnnUnavailableError: there is no cuDNN here.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder; `cudnn-mha compile --out {path}` makes one")
    store = Store(path, read_only=True)
    cache.add_store(store)
    plans.forget_kept()  # calls that were decided without these plans are decided anew
    return survey(store)


def survey(store: Store) -> Loaded:
    """What of a folder can be used by the cuDNN and the GPUs that are here."""
    gpus = None
    if torch.cuda.is_available():
        gpus = [gpu_facts(devices.cuda(i)) for i in range(torch.cuda.device_count())]
    here = {
        "cudnn": version_text(runtime.cudnn_version()),
        "frontend": runtime.frontend_version(),
        "environment": list(runtime.plan_environment()),
    }
    usable = 0
    skipped: dict[str, int] = {}
    for found in store.inspect():
        why = found.problem
        if found.entry is not None:
            key = found.entry.key
            wrong = [f"{n} {key[n]}, here is {v}" for n, v in here.items() if key[n] != v]
            if gpus is not None and key["gpu"] not in gpus:
                names = sorted({_gpu_text(gpu) for gpu in gpus})
                wrong.append(f"{_gpu_text(key['gpu'])}, here is {' and '.join(names)}")
            why = f"for {'; '.join(wrong)}" if wrong else None
        if why is None:
            usable += 1
        else:
            skipped[why] = skipped.get(why, 0) + 1
    return Loaded(str(store.folder), usable, skipped)


def _gpu_text(facts: Mapping[str, Any]) -> str:
    return f"{facts['name']} with {facts['multiprocessors']} multiprocessors"


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _end_with(parent: int) -> None:
    """Ends this process once its parent is gone, even if that was killed and could tell nobody."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _all(
    pool: Executor, work: Callable[..., Outcome], tasks: Sequence[Any], progress: Progress | None
) -> list[Outcome]:
    """The outcomes in the order of the tasks."""
    futures = {pool.submit(work, *task): number for number, task in enumerate(tasks)}
    found: dict[int, Outcome] = {}
    try:
        for future in as_completed(futures):
            found[futures[future]] = outcome = future.result()
            if progress is not None:
                progress(outcome)
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    return [found[number] for number in range(len(tasks))]


def _compile_into(
    spec: AttentionSpec, gpu: str, folder: str, workspace_limit: int | None
) -> Outcome:
    device = devices.described(gpu)
    spec = checks.remedied(spec, device)
    reasons = checks.check(spec, device, runtime.cudnn_version())
    if reasons:  # the calls will find these themselves
        return Outcome(gpu, str(spec), reasons=tuple(map(str, reasons)))
    store = Store(Path(folder))
    key = plan_key(spec, device, workspace_limit)
    entry = store.load(key.to_dict())
    seconds = 0.0
    if entry is None:
        start = time.perf_counter()
        try:
            entry = cache.stored(key, Slot(compile_plan(spec, device, workspace_limit)))
        except Refused as refused:
            entry = cache.stored(key, Slot(None, refused.reason))
        except Exception as error:  # whatever it is, the other graphs do not depend on it
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Outcome(gpu, str(spec), reasons=(words,))
        seconds = time.perf_counter() - start
        store.write(entry)
    if entry.refusal is not None:
        return Outcome(gpu, str(spec), seconds=seconds, reasons=(str(entry.refusal),))
    size = store.path(key.to_dict()).stat().st_size
    return Outcome(gpu, str(spec), entry.engine, entry.workspace, size, seconds)


def _make_ready(spec: AttentionSpec, device: Device, workspace_limit: int | None) -> Outcome:
    spec = checks.remedied(spec, device)
    reasons = checks.check(spec, device, runtime.cudnn_version())
    if reasons:
        return Outcome(device.name, str(spec), reasons=tuple(map(str, reasons)))
    start = time.perf_counter()
    slot = plans.get_or_build(plan_key(spec, device, workspace_limit))
    seconds = time.perf_counter() - start
    if slot.plan is None:
        return Outcome(device.name, str(spec), seconds=seconds, reasons=(str(slot.refusal),))
    return Outcome(device.name, str(spec), slot.plan.engine, slot.plan.workspace, seconds=seconds)
