"""How long the first call of each of many shapes takes, in a process of its own.

Shared by ``python -m benchmarks.lengths`` and ``python -m benchmarks.coldstart``. The process is
told the shapes as JSON on its standard input and answers with JSON on its standard output. A call
is a causal forward and its backward, heads side by side in memory, and ends when the GPU is done.
The caller's variables of the package are kept from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 180.0
"""Seconds after which a process is taken for hung."""

PREFIX = "TORCH_CUDNN_MHA_"
MEMORY = 2**29
"""Bytes that no call has to wait for."""

CHECKED = 5
"""How many of the shapes are compared with the definition."""

NO_GPU = "this needs an NVIDIA GPU that torch can use; none is here"


class Shape(NamedTuple):
    """Of one call."""

    batch: int
    heads: int
    seq: int
    dim: int


@dataclass
class Answer:
    """What a process measured.

    Attributes:
        seconds: of the first call of each shape.
        builds, loads: plans that it compiled, and that it took from disk; None for PyTorch.
        error: the largest distance of output and gradients from the definition's, over some of
            the shapes.
        environment: what it ran on.
    """

    seconds: list[float]
    builds: int | None
    loads: int | None
    error: float
    environment: dict[str, str]


class FailedError(Exception):
    """The process measured nothing."""


def ask(
    who: str,
    shapes: Sequence[Shape],
    variables: Mapping[str, str],
    command: Sequence[str] = (sys.executable, "-m", "benchmarks.first_calls"),
) -> Answer:
    """What a new process measures.

    Args:
        who: "ours" or "cudnn", PyTorch's.
        shapes: in the order of the calls.
        variables: of the package, without their prefix.
        command: what runs.

    Raises:
        FailedError: it ended without an answer, or computes wrong values.
    """
    from benchmarks.peers import TOLERANCE

    environment = {name: v for name, v in os.environ.items() if not name.startswith(PREFIX)}
    environment |= {PREFIX + name: value for name, value in variables.items()}
    try:
        done = subprocess.run(
            [*command, who],
            input=json.dumps(shapes),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            cwd=ROOT,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"{who}: no answer within {PATIENCE:g} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise FailedError(f"{who}: {last[0]}")
    try:
        answer = Answer(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError) as error:
        raise FailedError(f"{who}: no answer but {done.stdout[-200:]!r}") from error
    if len(answer.seconds) != len(shapes) or not answer.error <= TOLERANCE:  # also where it is NaN
        raise FailedError(f"{who}: wrong values, relative error {answer.error:.2g}")
    return answer


def measure(who: str, shapes: Sequence[Shape], device: str = "cuda") -> Answer:
    """Calls every shape for the first time."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from benchmarks import timing
    from benchmarks.peers import relative_error
    from cudnn_mha import cache_info, cudnn_sdpa, reference

    ours = who == "ours"

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def make(shape: Shape) -> list[Tensor]:
        """Query, key and value, and the gradient of the output."""
        b, h, s, d = shape
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        made = [torch.randn(b, s, h, d, **options).transpose(1, 2) for _ in range(4)]
        return [*(t.requires_grad_() for t in made[:3]), made[3]]

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        q, k, v, grad_output = tensors
        if ours:
            output = cudnn_sdpa(q, k, v, is_causal=True, fallback=device != "cuda")
        else:
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [output, *torch.autograd.grad(output, (q, k, v), grad_output)]

    def definition(tensors: Sequence[Tensor]) -> list[Tensor]:
        q, k, v = (t.detach().double().requires_grad_() for t in tensors[:3])
        output, _ = reference.attention(q, k, v, is_causal=True)
        return [output, *torch.autograd.grad(output, (q, k, v), tensors[3].double())]

    torch.manual_seed(0)
    only: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if not ours and device == "cuda":
        only = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    with only:
        torch.empty(MEMORY, dtype=torch.uint8, device=device)  # kept by PyTorch for the calls
        call(make(Shape(1, 2, 128, 32)))  # loads the libraries; no plan of it serves another shape
        wait()
        before = cache_info()
        seconds = []
        for shape in shapes:
            tensors = make(shape)
            wait()
            start = time.perf_counter()
            call(tensors)
            wait()
            seconds.append(time.perf_counter() - start)
        after = cache_info()
        errors: list[float] = []
        for shape in shapes[:: max(1, len(shapes) // CHECKED)]:
            tensors = make(shape)
            errors += map(relative_error, call(tensors), definition(tensors))
    return Answer(
        seconds,
        after.builds - before.builds if ours else None,
        after.loads - before.loads if ours else None,
        float(torch.tensor(errors).max()),  # NaN if one is
        timing.environment() or {},
    )


def header(environment: Mapping[str, str]) -> str:
    """What was measured on."""
    names = ("GPU", "driver", "torch", "cuDNN", "frontend", "cudnn_mha", "date")
    return "\n".join(f"{name}: {environment.get(name, 'unknown')}" for name in names)


def report(found: Mapping[str, object], text: str, out: Path | None, *, as_json: bool) -> None:
    """Prints the numbers, as text or as JSON, and writes the JSON where a file is named."""
    whole = json.dumps(found, indent=1)
    print(whole if as_json else text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(whole + "\n")


def records(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """The answers for JSON, what they ran on once."""
    environment = next(iter(answers.values())).environment
    runs: dict[str, Any] = {name: asdict(answer) for name, answer in answers.items()}
    for run in runs.values():
        del run["environment"]
    return {"environment": environment, "runs": runs}


def count(value: int | None) -> str:
    """A number that may not be known."""
    return "-" if value is None else str(value)


def main(arguments: Iterable[str] | None = None) -> int:
    """Answers one question: 0 measured, 1 no GPU."""
    import torch

    (who,) = sys.argv[1:] if arguments is None else arguments
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 1
    shapes = [Shape(*sizes) for sizes in json.load(sys.stdin)]
    print(json.dumps(asdict(measure(who, shapes))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
