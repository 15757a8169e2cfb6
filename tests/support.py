"""What the tests share: specs in one line, cuDNN's own answer to one, the command line."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from click.testing import CliRunner, Result

from cudnn_mha import cli, devices, runtime
from cudnn_mha.devices import Device
from cudnn_mha.graph_builder import propose_plans
from cudnn_mha.spec import (
    AttentionSpec,
    Direction,
    TensorSpec,
    contiguous_stride,
    default_scale,
    dense_stride,
    layout_like,
)


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Fails where the host waits for the GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


PROFILES = tuple(devices.profile_names())

FORWARD = Direction.FORWARD
BACKWARD = Direction.BACKWARD

BHSD = (0, 1, 2, 3)
BSHD = (0, 2, 1, 3)

ESCAPE = "\x1b"


def tensor(
    shape: Sequence[int], dtype: str = "float16", order: Sequence[int] | None = None
) -> TensorSpec:
    """A tensor without gaps; ``order`` names its dimensions from the outermost in."""
    stride = contiguous_stride(shape) if order is None else dense_stride(shape, order)
    return TensorSpec(tuple(shape), stride, dtype)


def attention(
    direction: Direction = FORWARD,
    *,
    batch: int = 2,
    heads: tuple[int, int, int] = (4, 4, 4),
    lengths: tuple[int, int] = (128, 128),
    dims: tuple[int, int] = (64, 64),
    dtype: str = "float16",
    order: Sequence[int] = BHSD,
    **fields: Any,
) -> AttentionSpec:
    """A spec as the edge of the package makes it, with ``fields`` set as given."""
    (hq, hk, hv), (sq, skv), (dqk, dv) = heads, lengths, dims
    given: dict[str, Any] = {
        "query": tensor((batch, hq, sq, dqk), dtype, order),
        "key": tensor((batch, hk, skv, dqk), dtype, order),
        "value": tensor((batch, hv, skv, dv), dtype, order),
        "scale": default_scale(dqk),
    }
    given |= {name: fields.pop(name) for name in list(given) if name in fields}
    query: TensorSpec = given["query"]
    given["output"] = fields.pop("output", layout_like((*query.shape[:3], dv), query))
    if direction is BACKWARD:
        given["grad_output"] = given["output"]
        for name in ("query", "key", "value"):
            given[f"grad_{name}"] = layout_like(given[name].shape, given[name])
    return AttentionSpec(direction, **(given | fields))


def with_bias(spec: AttentionSpec, shape: Sequence[int], dtype: str | None = None) -> TensorSpec:
    """A bias for ``spec`` in the form the edge makes: a length of 1 for Sq is stride 0."""
    batch, heads, seq_q, seq_kv = shape
    stride = list(contiguous_stride(shape))
    if seq_q == 1:
        stride[2] = 0
    del seq_q
    return TensorSpec((batch, heads, spec.seq_q, seq_kv), tuple(stride), dtype or spec.query.dtype)


def refusal(spec: AttentionSpec, device: Device) -> str | None:
    """cuDNN's words against ``spec`` on ``device``; None where it proposes a plan."""
    try:
        graph = propose_plans(spec, device)
    except runtime.library().cudnnGraphNotSupportedError as error:
        return " ".join(str(error).split())
    if all(plan.cpp_index is None for plan in graph.plans):
        return "no plan but the frontend's own"
    return None


def run(*arguments: str) -> Result:
    """The command ``cudnn-mha`` with these arguments, in this process."""
    result = CliRunner().invoke(cli.main, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def parsed(result: Result) -> Any:
    """The JSON that it printed, and nothing else."""
    assert result.stderr == ""
    return json.loads(result.stdout)
