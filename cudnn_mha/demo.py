"""The demonstration: representative calls compiled, computed, checked and timed."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import RenderableType
from rich.progress import Progress
from rich.text import Text
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cudnn_mha import config, devices, printing, reference, runtime
from cudnn_mha.cache import cache_info
from cudnn_mha.errors import CudnnSdpaUnsupportedError
from cudnn_mha.explanation import explain
from cudnn_mha.functional import cudnn_sdpa

Direction = Literal["forward", "backward"]
Shape = tuple[int, int, int, int]
Attend = Callable[..., Tensor]
Step = Callable[[], object]
Clock = Callable[[Step], float]

PEERS = {
    "CUDNN_ATTENTION": "PyTorch's cuDNN",
    "FLASH_ATTENTION": "FlashAttention",
    "EFFICIENT_ATTENTION": "memory-efficient",
}
"""PyTorch's backends to compare with, by their names in `torch.nn.attention.SDPBackend`."""

OURS = "cudnn_mha"

DESCRIBED = "h200"
"""The GPU to describe where there is none and none is named."""

HALF_FLOOR = 5e-3
"""Relative error that any bfloat16 result may have."""

FLOAT_LIMIT = 1e-5
"""Relative error that a float32 result may have."""

MATH_FACTOR = 1.5
"""How much larger than that of PyTorch's plain mathematics in the same dtype an error may be."""

CALLS_PER_SAMPLE = 5
SAMPLES = 15


@dataclass(frozen=True)
class Call:
    """One call of the demonstration, in bfloat16 on a GPU.

    Attributes:
        name: what it stands for.
        query: ``(B, Hq, Sq, D)``.
        key: ``(B, Hkv, Skv, D)``, of the value too.
        causal: query i sees key j where j <= i.
        padded: a boolean ``(B, 1, 1, Skv)`` mask hides the end of each sequence.
        backward: gradients are computed too.
    """

    name: str
    query: Shape
    key: Shape
    causal: bool = False
    padded: bool = False
    backward: bool = True

    @property
    def directions(self) -> tuple[Direction, ...]:
        return ("forward", "backward") if self.backward else ("forward",)

    @property
    def mask(self) -> Shape | None:
        return (self.key[0], 1, 1, self.key[2]) if self.padded else None

    @property
    def gqa(self) -> bool:
        return self.query[1] != self.key[1]

    @property
    def shape(self) -> str:
        query, key = (",".join(map(str, shape)) for shape in (self.query, self.key))
        return query if query == key else f"{query} : {key}"

    def small(self) -> Call:
        """The same call with less work, for a CPU."""

        def shrunk(shape: Shape) -> Shape:
            batch, heads, length, dim = shape
            return min(batch, 2), heads // 4, max(1, length // 8), dim

        return dataclasses.replace(self, query=shrunk(self.query), key=shrunk(self.key))


CALLS = (
    Call("causal, D = 64", (8, 16, 2048, 64), (8, 16, 2048, 64), causal=True),
    Call("causal, D = 128", (8, 16, 2048, 128), (8, 16, 2048, 128), causal=True),
    Call("grouped heads, few queries", (8, 32, 16, 128), (8, 8, 4096, 128)),
    Call("padded keys", (8, 16, 1024, 128), (8, 16, 1024, 128), padded=True),
    Call("odd lengths, causal", (8, 16, 777, 64), (8, 16, 777, 64), causal=True),
    # The backward of this head dimension needs Hopper or Blackwell.
    Call("D = 256, forward", (4, 8, 2048, 256), (4, 8, 2048, 256), backward=False),
)


@dataclass
class GraphResult:
    """What was learned of one graph of a call.

    Attributes:
        direction: forward or backward.
        engine: cuDNN's name of the engine.
        workspace: bytes of scratch device memory.
        build_seconds: what compiling the graph took.
        milliseconds: device time on the GPU by who computes; None for who refuses.
    """

    direction: Direction
    engine: str | None
    workspace: int | None
    build_seconds: float
    milliseconds: dict[str, float | None] = field(default_factory=dict)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the fastest of the peers."""
        peers = [t for name, t in self.milliseconds.items() if name != OURS and t is not None]
        ours = self.milliseconds.get(OURS)
        return min(peers) / ours if peers and ours else None


@dataclass
class CallResult:
    """What was learned of one call.

    Attributes:
        name: what the call stands for.
        shape: of query, and of key and value if that is another.
        checked: shapes of the call whose values were checked, smaller without a GPU.
        error: the largest relative error of output and gradients.
        limit: how large it may be.
        failure: what is wrong; None where nothing is.
        graphs: forward, then backward.
    """

    name: str
    shape: str
    checked: str = ""
    error: float | None = None
    limit: float | None = None
    failure: str | None = None
    graphs: list[GraphResult] = field(default_factory=list)

    def judge(self, error: float, limit: float) -> None:
        """Keeps the error, and whether it makes the call a failure."""
        self.limit = limit
        self.error = error if math.isfinite(error) else None
        if not error <= limit:
            self.failure = f"wrong values: relative error {error:.2g}, at most {limit:.2g} is right"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        plain = dataclasses.asdict(self)
        for graph, result in zip(plain["graphs"], self.graphs, strict=True):
            graph["speedup"] = result.speedup
        return plain


@dataclass(frozen=True)
class Outcome:
    """What the demonstration did and found.

    Attributes:
        device: name of the GPU.
        ran: whether the calls ran on it; it was only described if not.
        cudnn: version of cuDNN.
        summary: says in plain words which of the two happened.
        calls: what was learned of each call.
    """

    device: str
    ran: bool
    cudnn: str
    summary: str
    calls: list[CallResult]

    @property
    def failed(self) -> bool:
        return any(call.failure for call in self.calls)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {
            "ok": not self.failed,
            "gpu": self.ran,
            "described": not self.ran,
            "device": self.device,
            "cudnn": self.cudnn,
            "summary": self.summary,
            "calls": [call.to_dict() for call in self.calls],
        }


def demonstrate(gpu: str | None) -> Outcome:
    """Goes through every call on the GPU of this machine or, with ``gpu``, for a described one."""
    cudnn = config.version_text(runtime.cudnn_version())
    here = torch.cuda.is_available()
    if here and gpu is None:
        device = devices.cuda(torch.cuda.current_device()).name
        summary = f"Ran on {device} with cuDNN {cudnn} and PyTorch {torch.__version__}."
        return Outcome(device, True, cudnn, summary, _results(None))
    gpu = gpu or DESCRIBED
    device = devices.described(gpu).name
    why = "--gpu describes a GPU" if here else "No GPU here"
    summary = (
        f"{why}: nothing was run on a GPU. The graphs were compiled by cuDNN {cudnn} for a "
        f"described {device}, the values computed by PyTorch on the CPU from smaller shapes."
    )
    return Outcome(device, False, cudnn, summary, _results(gpu))


def _results(gpu: str | None) -> list[CallResult]:
    console = printing.console(stderr=True)
    results = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(CALLS))
        for call in CALLS:
            progress.update(task, description=call.name)
            result = _compile(call, gpu)
            if result.failure is None:
                if gpu is None:
                    _run(call, result)
                else:
                    _compute_on_cpu(call.small(), result)
            results.append(result)
            progress.advance(task)
    return results


def _compile(call: Call, gpu: str | None) -> CallResult:
    """Has cuDNN compile the graphs of the call, one by one."""
    result = CallResult(call.name, call.shape)
    for direction in call.directions:
        before = cache_info().build_seconds
        explanation = explain(
            call.query,
            call.key,
            call.key,
            call.mask,
            is_causal=call.causal,
            enable_gqa=call.gqa,
            # With it the forward graph is the one that a backward needs.
            return_lse=call.backward,
            requires_grad=direction == "backward",
            gpu=gpu,
        )
        if not explanation.served:
            reasons = "; ".join(map(str, explanation.reasons))
            result.failure = f"{direction} not served by cuDNN: {reasons}"
            break
        graph = explanation.graphs[-1]
        seconds = cache_info().build_seconds - before
        result.graphs.append(GraphResult(direction, graph.engine, graph.workspace, seconds))
    return result


class Data(NamedTuple):
    """Inputs of a call, and the gradient of its output."""

    leaves: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    grad_output: Tensor


def _data(call: Call, dtype: torch.dtype, device: str) -> Data:
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    leaves = draw(call.query), draw(call.key), draw(call.key)
    mask = None
    if call.padded:
        batch, _, keys, _ = call.key
        lengths = torch.arange(1, batch + 1, device=device) * keys // batch
        mask = torch.arange(keys, device=device) < lengths.view(batch, 1, 1, 1)
    for leaf in leaves:
        leaf.requires_grad_(call.backward)
    return Data(leaves, mask, draw(call.query))


def _ours(call: Call, *, fallback: bool) -> Attend:
    return functools.partial(
        cudnn_sdpa, is_causal=call.causal, enable_gqa=call.gqa, fallback=fallback
    )


def _torchs(call: Call, backend: str) -> Attend:
    """PyTorch's function, served by one backend alone."""
    only = getattr(SDPBackend, backend)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        with sdpa_kernel(only):
            return F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=call.causal, enable_gqa=call.gqa
            )

    return attend


def _reference(call: Call) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return reference.attention(query, key, value, mask, is_causal=call.causal)[0]

    return attend


def _values(attend: Attend, data: Data) -> list[Tensor]:
    """The output, and the gradients of query, key and value if they are wanted."""
    output = attend(*data.leaves, data.mask)
    if not output.requires_grad:
        return [output]
    return [output.detach(), *torch.autograd.grad(output, data.leaves, data.grad_output)]


def _values_by_batch(attend: Attend, data: Data, dtype: torch.dtype) -> list[Tensor]:
    """The same in ``dtype``, one batch entry at a time, for what needs much memory."""
    parts = []
    for at in range(len(data.grad_output)):
        query, key, value = (
            leaf.detach()[at : at + 1].to(dtype).requires_grad_(leaf.requires_grad)
            for leaf in data.leaves
        )
        mask = None if data.mask is None else data.mask[at : at + 1]
        grad_output = data.grad_output[at : at + 1].to(dtype)
        parts.append(_values(attend, Data((query, key, value), mask, grad_output)))
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def _error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error of the tensors; NaN if one has a NaN."""
    errors = [
        (a.double() - b.double()).norm() / b.double().norm()
        for a, b in zip(got, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def _compute_on_cpu(call: Call, result: CallResult) -> None:
    result.checked = call.shape
    data = _data(call, torch.float32, "cpu")
    expected = _values_by_batch(_reference(call), data, torch.float64)
    result.judge(_error(_values(_ours(call, fallback=True), data), expected), FLOAT_LIMIT)


def _run(call: Call, result: CallResult) -> None:
    """Computes, checks and times the call on the GPU."""
    result.checked = call.shape
    try:
        data = _data(call, torch.bfloat16, "cuda")
        ours = _ours(call, fallback=False)
        expected = _values_by_batch(_reference(call), data, torch.float64)
        plain = _values_by_batch(_torchs(call, "MATH"), data, torch.bfloat16)
        limit = max(HALF_FLOOR, MATH_FACTOR * _error(plain, expected))
        result.judge(_error(_values(ours, data), expected), limit)
        del expected, plain
        attends = {OURS: ours, **{peer: _torchs(call, peer) for peer in PEERS}}
        clock = _cuda_clock()
        for graph in result.graphs:
            times = _median_times(_steps(attends, data, graph.direction), clock)
            graph.milliseconds = {name: times.get(name) for name in attends}
    except (CudnnSdpaUnsupportedError, torch.OutOfMemoryError) as error:
        result.failure = str(error)


def _steps(attends: Mapping[str, Attend], data: Data, direction: Direction) -> dict[str, Step]:
    """What to time of everyone who serves the call."""
    steps = {}
    for name, attend in attends.items():
        try:
            # PyTorch warns of each reason why a backend refuses.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                steps[name] = _step(attend, data, direction)
        except RuntimeError:
            if name == OURS:
                raise
    return steps


def _step(attend: Attend, data: Data, direction: Direction) -> Step:
    """One direction of the call, which has run once."""
    output = attend(*data.leaves, data.mask)
    if direction == "forward":
        return lambda: attend(*data.leaves, data.mask)

    def backward() -> object:
        return torch.autograd.grad(output, data.leaves, data.grad_output, retain_graph=True)

    backward()
    return backward


def _median_times(steps: Mapping[str, Step], clock: Clock) -> dict[str, float]:
    """The median of each step's times; they take turns, so that what disturbs one disturbs all."""
    for step in steps.values():
        clock(step)  # warm-up
    samples = [{name: clock(step) for name, step in steps.items()} for _ in range(SAMPLES)]
    return {name: statistics.median(sample[name] for sample in samples) for name in steps}


def _cuda_clock() -> Clock:
    """Measures milliseconds of device time."""
    matrix = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(matrix)
    event: Any = torch.cuda.Event

    def clock(step: Step) -> float:
        start, end = (event(enable_timing=True) for _ in range(2))
        # Work for the GPU while the host runs ahead, so that it does not wait for the host later.
        torch.mm(matrix, matrix, out=product)
        start.record()
        for _ in range(CALLS_PER_SAMPLE):
            step()
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / CALLS_PER_SAMPLE

    return clock


def show(outcome: Outcome) -> None:
    """Prints the outcome: the summary, a table, and what failed."""
    console = printing.console()
    if outcome.ran:
        peers = [f">{peer}\nms" for peer in PEERS.values()]
        columns = ["call", "graph", "engine", ">error", ">ours\nms", *peers, ">speed"]
    else:
        columns = ["call", "graph", "engine", ">workspace", ">build s", ">error", "checked shape"]
    table = printing.table(None, [], *columns)
    for call in outcome.calls:
        for row in _rows(call, ran=outcome.ran):
            table.add_row(*row)
        table.add_section()
    printing.line(console, (outcome.summary, "bold"))
    console.print(table)
    printing.line(
        console,
        "error: the largest of output and gradients, relative to the mathematics in float64",
    )
    if outcome.ran:
        printing.line(
            console,
            "ms: device time, the median of repetitions in turns; -: the backend refuses the call; "
            "speed: the fastest of PyTorch's backends / ours",
        )
    for call in outcome.calls:
        if call.failure:
            printing.line(console, ("failed  ", "bold red"), f"{call.name}: {call.failure}")
    if not outcome.failed:
        graphs = "graph ran" if outcome.ran else "graph compiled"
        printing.line(console, (f"every {graphs}, every value is right", "bold green"))


def _rows(result: CallResult, *, ran: bool) -> list[list[RenderableType]]:
    """A row for each graph; the shape stands below the name."""
    rows: list[list[RenderableType]] = []
    for graph in result.graphs:
        engine = graph.engine or "-"
        error = "" if rows else printing.number_text(result.error, ".1e")
        row: list[RenderableType]
        if ran:
            times = graph.milliseconds
            # The engine's knobs would leave no room for the times.
            row = [graph.direction, engine.partition("_")[0], error]
            row += [printing.number_text(times.get(name), ".3f") for name in (OURS, *PEERS)]
            row.append(printing.number_text(graph.speedup, ".2f"))
        else:
            seconds = printing.number_text(graph.build_seconds, ".1f")
            row = [graph.direction, engine, printing.byte_text(graph.workspace), seconds, error]
            row.append("" if rows else result.checked)
        rows.append(row)
    heads: list[RenderableType] = [result.name, Text(result.shape, "dim")]
    rows += [[] for _ in range(len(heads) - len(rows))]
    return [[head, *row] for head, row in zip(heads, rows, strict=True)]
