"""Attention on several ranks, on GPUs: two processes on one of them by gloo, or on two by NCCL."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Placement
from torch.nn.attention import SDPBackend, sdpa_kernel

import cudnn_mha
from cudnn_mha import cudnn_sdpa, reference
from tests.gpt import GPT, VOCABULARY, train
from tests.oracle import NAMES, Call, Results, assert_right
from tests.ranks import Ranks, device, mesh
from tests.test_context_parallel import ring
from tests.test_distributed import BATCH, HEADS, WHOLE, shard
from tests.test_gpu_values import BF16, FP32, call
from tests.test_training import wrapped

ONE = pytest.param("ranks_on_one_gpu", marks=pytest.mark.gpu, id="one_gpu")
TWO = pytest.param(
    "ranks_on_two_gpus", marks=[pytest.mark.gpu, pytest.mark.multi_gpu], id="two_gpus"
)
MASKS: dict[str, tuple[int, ...]] = {
    "whole": (2, 4, 136, 200),
    "of_batch": (2, 1, 136, 200),
    "of_heads": (1, 4, 1, 200),
    "2d": (136, 200),
}


@pytest.fixture(params=[ONE, TWO])
def gpu_ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = request.getfixturevalue(request.param)
    return found


def counts() -> tuple[int, int, int]:
    now = cudnn_mha.status()
    return now.served, now.served_backward, now.fallbacks


def counted(before: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(before, counts(), strict=True))


# ----------------------------------------------------------------------------- batch and heads


def placed_leaves(case: Call, placement: Placement) -> list[Any]:
    """The leaves of a call, query, key and value sharded and the mask not."""
    leaves = [t.detach() for t in case.leaves()]
    found = shard(leaves[:3], mesh(), placement) + shard(leaves[3:], mesh(), WHOLE)
    return [t.requires_grad_() for t in found]


def gathered(case: Call, placement: Placement, leaves: list[Any], output: Any, lse: Any) -> Results:
    assert output.placements == (placement,)
    assert case.grad_output is not None
    grads: Any = torch.autograd.grad(
        output, leaves, shard([case.grad_output], mesh(), placement)[0]
    )
    results = {"output": whole(output.detach())}
    if lse is not None:
        results["lse"] = whole(lse.detach())
    return results | {n: whole(g) for n, g in zip(NAMES, grads, strict=False)}


def whole(tensor: Any) -> Tensor:
    """What `full_tensor` gives, by way of the CPU: PyTorch 2.11 crashes there with gloo on GPUs."""
    (placement,) = tensor.placements
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.to_local().cpu())
    if placement.is_shard():
        return torch.cat(parts, placement.dim).to(device())
    found: Tensor = sum(parts) if placement.is_partial() else parts[0]
    return found.to(device())


def by_us(placement: Placement, case: Call, *, gradients: bool = True) -> Results:
    leaves = placed_leaves(case, placement)
    mask = leaves[3] if len(leaves) > 3 else None
    output, lse = cudnn_sdpa(*leaves[:3], mask, return_lse=True, fallback=False, **case.options)
    return gathered(case, placement, leaves, output, lse)


def by_pytorchs_function(placement: Placement, case: Call, *, gradients: bool = True) -> Results:
    leaves = placed_leaves(case, placement)
    mask = None if case.mask is None else shard([case.mask], mesh(), WHOLE)[0]
    with cudnn_mha.enabled(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        before = counts()
        output = F.scaled_dot_product_attention(*leaves, mask, **case.options)
        results = gathered(case, placement, leaves, output, None)
        assert counted(before) == (1, 1, 0)
    return results


def values(
    results: Any, placement: Placement, heads: tuple[int, int, int], mask: str | None
) -> None:
    own = results is by_us
    bias = None
    if mask is not None:
        bias = torch.randn(MASKS[mask], device=device()).to(FP32 if own else BF16)
        bias.requires_grad_(own)  # PyTorch's cuDNN attention has no gradient of it
    case = call(heads=heads, lengths=(136, 200), mask=bias, is_causal=mask is None)
    assert_right(case, results=partial(results, placement))


@pytest.mark.parametrize("results", [by_us, by_pytorchs_function])
@pytest.mark.parametrize("placement", [BATCH, HEADS], ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 4), (8, 2, 2)], ids=str)
def test_sharded_values(
    gpu_ranks: Ranks, heads: tuple[int, int, int], placement: Placement, results: Any
) -> None:
    gpu_ranks(values, results, placement, heads, None)


@pytest.mark.parametrize("results", [by_us, by_pytorchs_function])
@pytest.mark.parametrize("placement", [BATCH, HEADS], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_sharded_values_with_a_mask(
    gpu_ranks: Ranks, mask: str, placement: Placement, results: Any
) -> None:
    gpu_ranks(values, results, placement, (4, 4, 4), mask)


# ---------------------------------------------------------------------------- context parallelism


def by_the_patched_function(leaves: list[Tensor], causal: bool) -> Tensor:
    """Looked up on every call: context parallelism puts its own in place of PyTorch's."""
    gqa = leaves[0].shape[1] != leaves[1].shape[1]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=gqa)


def ring_values(heads: int, causal: bool, balanced: bool, rotate: str) -> tuple[int, ...]:
    """Compares with whole attention in float64; returns who computed the steps."""
    shapes = [(2, 512, 4, 64), (2, 512, heads, 64), (2, 512, heads, 64), (2, 512, 4, 64)]
    tensors = [torch.randn(s, device=device()).to(BF16).transpose(1, 2) for s in shapes]
    with cudnn_mha.enabled():
        before = counts()
        got = ring(by_the_patched_function, tensors, causal, balanced, rotate)
        found = counted(before)
    leaves = [t.double().requires_grad_() for t in tensors[:3]]
    output, _ = reference.attention(*leaves, is_causal=causal, compute_dtype=torch.float64)
    want = [output, *torch.autograd.grad(output, leaves, tensors[3].double())]
    for one, other in zip(got, want, strict=True):
        assert (one.double() - other).norm() < 0.01 * other.norm()
    return found


@pytest.mark.gpu
@pytest.mark.multi_gpu  # rings talk by the collectives that crash with gloo on one GPU
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(
    ("causal", "balanced"), [(False, False), (True, False), (True, True)], ids=str
)
def test_rings(
    ranks_on_two_gpus: Ranks, heads: int, causal: bool, balanced: bool, rotate: str
) -> None:
    steps = 1 if causal and not balanced else 2
    found = ranks_on_two_gpus(ring_values, heads, causal, balanced, rotate)
    assert found == [(steps, steps, 0), (2, 2, 0)]


# --------------------------------------------------------------------------------------- training


def trained(
    manner: str, checkpointed: bool, compiled: bool, by_pytorch: bool
) -> tuple[list[float], list[float], tuple[int, ...]]:
    """Losses in bfloat16 on two ranks and on one, and who computed attention on two."""
    torch._dynamo.reset()
    attend = F.scaled_dot_product_attention if by_pytorch else partial(cudnn_sdpa, fallback=False)
    torch.manual_seed(0)
    alone = GPT(attend).to(device())
    shared: Any = GPT(attend, checkpointed=checkpointed).to(device())
    shared.load_state_dict(alone.state_dict())
    batches = list(torch.randint(VOCABULARY, (4, 4, 128), device=device()))
    own = [batch.chunk(dist.get_world_size())[dist.get_rank()] for batch in batches]
    model: Any = wrapped(shared, manner, BF16)
    if compiled:
        model = torch.compile(model)
    with (
        cudnn_mha.enabled(),
        sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        torch.autocast("cuda", BF16),
    ):
        want = train(alone, batches)
        before = counts()
        losses = torch.tensor(train(model, own), device=device())
        found = counted(before)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist(), want, found


def check_training(
    ranks: Ranks, manner: str, checkpointed: bool, compiled: bool, by_pytorch: bool
) -> None:
    for losses, want, found in ranks(trained, manner, checkpointed, compiled, by_pytorch):
        assert losses == pytest.approx(want, rel=0.01)
        if by_pytorch:  # 4 steps of 2 blocks; a checkpoint runs twice, a compiled one perhaps
            forward = {8 * (1 + checkpointed)} | ({8} if compiled else set())
            assert found[0] in forward and found[1:] == (8, 0)
        else:
            assert found == (0, 0, 0)  # none went by PyTorch's operators, and none may fall back


@pytest.mark.gpu
@pytest.mark.parametrize("by_pytorch", [False, True])
def test_training_on_one_gpu(ranks_on_one_gpu: Ranks, by_pytorch: bool) -> None:
    check_training(ranks_on_one_gpu, "ddp", False, False, by_pytorch)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("by_pytorch", [False, True])
@pytest.mark.parametrize(
    ("manner", "checkpointed", "compiled"),
    [
        ("ddp", False, False),
        ("ddp", True, False),
        ("ddp", False, True),
        ("fsdp", False, False),
        ("fsdp", True, False),
        ("fsdp", True, True),
    ],
)
def test_training_on_two_gpus(
    ranks_on_two_gpus: Ranks, manner: str, checkpointed: bool, compiled: bool, by_pytorch: bool
) -> None:
    check_training(ranks_on_two_gpus, manner, checkpointed, compiled, by_pytorch)
