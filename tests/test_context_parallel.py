"""PyTorch's context parallelism, its ring of attention calls, in two processes without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    context_parallel_unshard,
    set_rotate_method,
)
from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options

from cudnn_mha import cudnn_sdpa, explain
from cudnn_mha.integrations import distributed
from tests import aten_on_cpu
from tests.ranks import Ranks, mesh

B, S, D = 2, 32, 16
OP = torch.ops.aten._scaled_dot_product_cudnn_attention
Attend = Callable[[list[Tensor], bool], Tensor]


@contextmanager
def options(balanced: bool, rotate: str) -> Iterator[None]:
    """Balancing gives each rank a part of the beginning and of the end; only for causal calls."""
    before = _cp_options.enable_load_balance
    _cp_options.enable_load_balance = balanced
    set_rotate_method(rotate)
    try:
        yield
    finally:
        _cp_options.enable_load_balance = before
        set_rotate_method("allgather")


def ring(
    attend: Attend, tensors: list[Tensor], causal: bool, balanced: bool, rotate: str
) -> list[Tensor]:
    """Output and gradients, put together again; ``tensors`` are query, key, value, upstream."""
    ranks = mesh()
    own = [t.clone() for t in tensors]
    with (
        options(balanced, rotate),
        context_parallel(ranks, buffers=own, buffer_seq_dims=[2] * 4),
    ):
        leaves = [t.clone().requires_grad_() for t in own[:3]]
        output = attend(leaves, causal)
        grads = torch.autograd.grad(output, leaves, own[3])
        parts = [output.detach(), *grads]
        return context_parallel_unshard(ranks, parts, [2] * len(parts))


def by_name(leaves: list[Tensor], causal: bool) -> Tensor:
    """As PyTorch's function does it under context parallelism, once cuDNN is its choice."""
    placed = [DTensor.from_local(t, mesh(), [Shard(2)]) for t in leaves]
    output: DTensor = OP(*placed, None, True, 0.0, causal)[0]
    return output.to_local()


def ring_values(heads: int, causal: bool, balanced: bool, rotate: str) -> list[Any]:
    """Compares with whole attention; returns the calls of this rank."""
    aten_on_cpu.install()
    distributed.register()
    shapes = [(B, S, 4, D), (B, S, heads, D), (B, S, heads, D), (B, S, 4, D)]
    tensors = [torch.randn(shape).transpose(1, 2) for shape in shapes]
    before = len(aten_on_cpu.calls)
    got = ring(by_name, tensors, causal, balanced, rotate)
    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    output = cudnn_sdpa(*leaves, is_causal=causal, enable_gqa=True)
    want = [output, *torch.autograd.grad(output, leaves, tensors[3])]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    return aten_on_cpu.calls[before:]


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(
    ("causal", "balanced"), [(False, False), (True, False), (True, True)], ids=str
)
def test_a_ring_is_whole_attention(
    ranks: Ranks, heads: int, causal: bool, balanced: bool, rotate: str
) -> None:
    calls = ranks(ring_values, heads, causal, balanced, rotate)
    # Two steps on each rank; without balance the first rank has nothing to do in the second.
    forward = [[c for c in own if c.name == "forward"] for own in calls]
    assert [len(own) for own in forward] == [1 if causal and not balanced else 2, 2]
    assert [len(own) for own in calls] == [2 * len(own) for own in forward]


def test_cudnn_serves_every_step_of_a_ring(ranks: Ranks) -> None:
    """In the layouts that PyTorch hands over: halves of sequences, with the strides of wholes."""
    calls = {
        (tuple(call.layouts.items()), call.is_causal): call
        for own in ranks(ring_values, 4, True, True, "allgather")
        for call in own
        if call.name == "backward"
    }
    halves = set()
    for call in calls.values():
        layouts = {n: call.layouts[n] for n in ("query", "key", "value")}
        tensors = [
            torch.empty_strided(shape, stride, dtype=torch.bfloat16, device="meta")
            for shape, stride in layouts.values()
        ]
        found = explain(*tensors, is_causal=call.is_causal, requires_grad=True, gpu="h200")
        assert found.served, str(found)
        halves.add((tensors[0].shape[2], tensors[1].shape[2], call.is_causal))
    assert halves == {(S // 2, S // 2, True), (S // 4, S // 2, False), (S // 2, S // 4, False)}
