"""Attention on several ranks without a GPU: sharding rules, and values in two processes on gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import local_map

import cudnn_mha
from cudnn_mha import CudnnSdpaUnsupportedError, cudnn_sdpa
from cudnn_mha.integrations import distributed
from cudnn_mha.ops import sdpa_backward, sdpa_forward, sdpa_inference
from tests import aten_on_cpu
from tests.ranks import Ranks, mesh

B, H, S, D = 2, 4, 6, 8
ATEN = torch.ops.aten
BATCH, HEADS, SEQUENCE, WHOLE = Shard(0), Shard(1), Shard(2), Replicate()


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def qkv(heads: tuple[int, int, int] = (H, H, H), batch: int = B, length: int = S) -> list[Tensor]:
    """In the layout of models: ``(B, S, H, D)`` in memory."""
    return [randn(batch, length, number, D).transpose(1, 2) for number in heads]


# The log-sum-exp that the backward works from is float32.
close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)

MASKS: dict[str, tuple[int, ...]] = {
    "whole": (B, H, S, S),
    "of_batch": (B, 1, S, S),
    "of_heads": (1, H, 1, S),
    "of_keys": (B, 1, 1, S),
    "3d": (H, S, S),
    "3d_one": (1, S, S),
    "2d": (S, S),
    "1d": (S,),
}


# ----------------------------------------------------------- rules, in one process of four ranks


@pytest.fixture
def grid() -> Iterator[DeviceMesh]:
    """Rank 0 of four, two by two, whose collectives go nowhere."""
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2))
    finally:
        dist.destroy_process_group()


def shard(tensors: list[Tensor], mesh: DeviceMesh, *placements: Placement) -> list[DTensor]:
    """The tensors placed alike; no rank sends any data, as all have all of it."""
    return [distribute_tensor(t, mesh, placements, src_data_rank=None) for t in tensors]


@pytest.mark.parametrize("placements", [(BATCH, HEADS), (HEADS, BATCH), (WHOLE, HEADS)], ids=str)
def test_batch_and_heads_on_a_grid(grid: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    query, key, value = shard(qkv((4, 2, 2)), grid, *placements)
    mask = distribute_tensor(randn(B, 1, S, S), grid, [WHOLE, WHOLE], src_data_rank=None)
    with CommDebugMode() as traffic:
        output, lse, seed, offset = sdpa_forward(query, key, value, mask, bias_gradient=True)
        grads = sdpa_backward(
            *(output, query, key, value, output, lse, seed, offset, mask, 0.0, False),
            bias_gradient=True,
        )
        alone = sdpa_inference(query, key, value, mask)
    assert traffic.get_total_counts() == 0
    for placed in (output, lse, alone, *grads[:3]):
        assert placed.placements == placements
    assert seed.placements == offset.placements == (WHOLE, WHOLE)
    # Each rank of the heads has a part of the sum; the mask has no dimension of heads to shard.
    assert grads[3].placements == tuple(Partial() if p == HEADS else p for p in placements)
    assert (output.shape, lse.shape) == ((B, 4, S, D), (B, 4, S, 1))
    assert [g.shape for g in grads] == [query.shape, key.shape, value.shape, mask.shape]


@pytest.mark.parametrize(
    ("heads", "placements", "expected"),
    [
        ((8, 4, 4), (HEADS, HEADS), (HEADS, HEADS)),
        ((8, 4, 2), (WHOLE, HEADS), (WHOLE, HEADS)),
        ((6, 3, 3), (BATCH, HEADS), (BATCH, WHOLE)),  # 3 groups for 2 ranks
        ((8, 2, 8), (BATCH, HEADS), (BATCH, HEADS)),
        ((5, 5, 5), (BATCH, HEADS), (BATCH, HEADS)),  # uneven, but every head is a group
        ((4, 4, 4), (SEQUENCE, HEADS), (WHOLE, HEADS)),
    ],
    ids=str,
)
def test_which_heads_stay_where_they_are(
    grid: DeviceMesh,
    heads: tuple[int, int, int],
    placements: tuple[Placement, ...],
    expected: tuple[Placement, ...],
) -> None:
    output = sdpa_inference(*shard(qkv(heads), grid, *placements), None)
    assert output.placements == expected
    assert output.shape == (B, heads[0], S, D)


def test_groups_that_only_one_dimension_of_the_mesh_divides(grid: DeviceMesh) -> None:
    output = sdpa_inference(*shard(qkv((8, 2, 2)), grid, HEADS, HEADS), None)
    assert sorted(map(str, output.placements)) == ["R", "S(1)"]


def test_what_a_decision_depends_on_besides_tensors(grid: DeviceMesh) -> None:
    tensors = shard(qkv(), grid, BATCH, HEADS)
    mask = distribute_tensor(randn(B, H, S, S), grid, [BATCH, HEADS], src_data_rank=None)
    for dropout_p, dimensions in ((0.0, 1), (0.5, 0), (0.0, 1)):
        assert sdpa_forward(*tensors, mask, dropout_p)[2].dim() == dimensions
    output, lse, seed, offset = sdpa_forward(*tensors, mask)
    for wanted, shape in ((False, (0,)), (True, (B, H, S, S)), (False, (0,))):
        found = sdpa_backward(
            *(output, *tensors, output, lse, seed, offset, mask, 0.0, False), bias_gradient=wanted
        )
        assert found[3].shape == shape


def test_only_cudnn_is_refused_on_the_cpu(grid: DeviceMesh) -> None:
    tensors = shard(qkv(), grid, BATCH, HEADS)
    with pytest.raises(CudnnSdpaUnsupportedError, match="must be on a CUDA device"):
        cudnn_sdpa(*tensors, fallback=False)


def test_what_sharded_tensors_are_not_taken_for(grid: DeviceMesh) -> None:
    query, key, value = shard(qkv(), grid, BATCH, HEADS)
    with pytest.raises(TypeError, match="local_map"):
        cudnn_sdpa(query, key, value, window=(1, 0))
    starts = torch.tensor([0, 3, 6])
    packed = [t[0].transpose(0, 1) for t in (query, key, value)]
    with pytest.raises(TypeError, match="local_map"):
        cudnn_mha.cudnn_sdpa_varlen(*packed, starts, starts, 3, 3)
    table, lengths = torch.zeros(B, 1, dtype=torch.int32), torch.full((B,), S)
    with pytest.raises(TypeError, match="local_map"):
        cudnn_mha.cudnn_sdpa_paged(query, key, value, table, lengths)


def test_local_map_for_the_rest(grid: DeviceMesh) -> None:
    whole = qkv()
    placements: list[Placement] = [BATCH, HEADS]
    attend = local_map(
        partial(cudnn_sdpa, is_causal=True, window=(1, 0)),
        out_placements=placements,
        in_placements=(placements,) * 3,
        device_mesh=grid,
    )
    output = attend(*shard(whole, grid, *placements))
    want = cudnn_sdpa(*whole, is_causal=True, window=(1, 0))
    assert output.shape == want.shape
    close(output.to_local(), want[:1, : H // 2])


# ------------------------------------------------------------------------------------ registration


def script(code: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_nothing_is_loaded_until_somebody_shards() -> None:
    found = script("""
import json, sys, warnings
import torch
import cudnn_mha
from cudnn_mha import cudnn_sdpa, ops
q = torch.randn(2, 4, 6, 8)
cudnn_sdpa(q, q, q)
ops.sdpa_inference(q, q, q, None)
cudnn_mha.enable()
cudnn_mha.disable()
loaded = "torch.distributed.tensor" in sys.modules
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
dist.init_process_group("fake", rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
d = distribute_tensor(q, mesh, [Shard(1)], src_data_rank=None)
direct = ops.sdpa_inference(d, d, d, None)
propagator = DTensor._op_dispatcher.sharding_propagator
op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
before = repr(propagator.op_strategy_funcs.get(op))
cudnn_mha.enable()
after = repr(propagator.op_strategy_funcs.get(op))
print(json.dumps({"loaded": loaded, "direct": str(direct.placements[0]), "before": before,
                  "after": after}))
""")
    assert not found["loaded"]
    assert found["direct"] == "S(1)"
    assert "cudnn_mha" not in found["before"] or "_strategy" not in found["before"]
    assert "_strategy.<locals>.strategy" in found["after"]


# ------------------------------------------------------------------- values, in two processes


def sharded_values(
    heads: tuple[int, int, int], mask: str | None, placement: Placement, causal: bool
) -> None:
    """Output, log-sum-exp and gradients of sharded tensors are those of whole ones."""
    whole = [t.requires_grad_() for t in qkv(heads)]
    if mask is not None:
        whole.append(randn(*MASKS[mask]).requires_grad_())
    upstream = randn(B, heads[0], S, D)
    options = {"is_causal": causal, "enable_gqa": True, "return_lse": True}
    want = cudnn_sdpa(*whole, **options)
    want_grads = torch.autograd.grad(want[0], whole, upstream)

    ranks = mesh()
    detached = [t.detach() for t in whole]
    placed = shard(detached[:3], ranks, placement) + shard(detached[3:], ranks, WHOLE)
    leaves = [t.requires_grad_() for t in placed]
    with CommDebugMode() as traffic:
        output, lse = cudnn_sdpa(*leaves, **options)
        found = torch.autograd.grad(output, leaves, shard([upstream], ranks, placement)[0])
    if placement != SEQUENCE:
        assert traffic.get_total_counts() == 0
        assert output.placements == lse.placements == (placement,)
    for got, right in zip((output, lse, *found), (*want, *want_grads), strict=True):
        close(got.full_tensor(), right)


@pytest.mark.parametrize("placement", [BATCH, HEADS, SEQUENCE, WHOLE], ids=str)
@pytest.mark.parametrize("heads", [(H, H, H), (4, 2, 2)], ids=str)
def test_sharded_values(ranks: Ranks, heads: tuple[int, int, int], placement: Placement) -> None:
    for causal in (False, True):
        ranks(sharded_values, heads, None, placement, causal)


@pytest.mark.parametrize("placement", [BATCH, HEADS], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_sharded_values_with_a_mask(ranks: Ranks, mask: str, placement: Placement) -> None:
    ranks(sharded_values, (H, H, H), mask, placement, False)


def uneven_values(heads: tuple[int, int, int], expected: Placement) -> None:
    whole = qkv(heads, batch=3)
    output = cudnn_sdpa(*shard(whole, mesh(), HEADS), is_causal=True, enable_gqa=True)
    assert output.placements == (expected,)
    want = cudnn_sdpa(*whole, is_causal=True, enable_gqa=True)
    close(output.full_tensor(), want)


@pytest.mark.parametrize(
    ("heads", "expected"), [((5, 5, 5), HEADS), ((12, 3, 3), WHOLE), ((12, 6, 3), WHOLE)], ids=str
)
def test_uneven_heads(ranks: Ranks, heads: tuple[int, int, int], expected: Placement) -> None:
    ranks(uneven_values, heads, expected)


def dropped_values() -> None:
    whole = qkv()
    placed: Any = [t.requires_grad_() for t in shard(whole, mesh(), HEADS)]
    local = [t.to_local().detach().requires_grad_() for t in placed]
    upstream = randn(B, H, S, D)
    torch.manual_seed(dist.get_rank())
    got: Any = cudnn_sdpa(*placed, dropout_p=0.5)
    torch.manual_seed(dist.get_rank())
    want, *_ = sdpa_forward(*local, None, 0.5)
    assert torch.equal(got.to_local(), want)
    assert not torch.equal(want, sdpa_forward(*local, None)[0])
    placed_upstream = shard([upstream], mesh(), HEADS)[0]
    found: Any = torch.autograd.grad(got, placed, placed_upstream)
    right = torch.autograd.grad(want, local, placed_upstream.to_local())
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one.to_local(), other)


def test_dropout_is_each_ranks_own(ranks: Ranks) -> None:
    ranks(dropped_values)


def three_dimensions_and_boolean_masks() -> None:
    query, key, value = (t[0] for t in qkv())
    keep = torch.rand(H, S, S) > 0.3
    keep[:, 0] = False
    placed = shard([query, key, value, keep], mesh(), Shard(0))
    got, lse = cudnn_sdpa(*placed, return_lse=True)
    want = cudnn_sdpa(query, key, value, keep, return_lse=True)
    assert got.shape == (H, S, D)
    close(got.full_tensor(), want[0])
    close(lse.full_tensor(), want[1])


def test_three_dimensions_and_boolean_masks(ranks: Ranks) -> None:
    ranks(three_dimensions_and_boolean_masks)


def gathered_tensors() -> None:
    whole = qkv()
    own = [t.chunk(2)[dist.get_rank()].contiguous() for t in whole]
    gathered = [all_gather_tensor(t, 0, dist.group.WORLD) for t in own]
    assert all(isinstance(t, AsyncCollectiveTensor) for t in gathered)
    output = cudnn_sdpa(*gathered, is_causal=True)
    assert type(output) is Tensor
    close(output, cudnn_sdpa(*whole, is_causal=True))


def test_tensors_that_a_collective_has_not_brought_yet(ranks: Ranks) -> None:
    ranks(gathered_tensors)


def compiled_values() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query: DTensor, key: DTensor, value: DTensor) -> Any:
        return cudnn_sdpa(query, key, value, is_causal=True, enable_gqa=True) * 2

    whole = [t.requires_grad_() for t in qkv((4, 2, 2))]
    want = cudnn_sdpa(*whole, is_causal=True, enable_gqa=True) * 2
    upstream = randn(B, H, S, D)
    placed = shard([t.detach() for t in whole], mesh(), HEADS)
    leaves = [t.requires_grad_() for t in placed]
    got = attend(*leaves)
    assert got.placements == (HEADS,)
    found: Any = torch.autograd.grad(got, leaves, shard([upstream], mesh(), HEADS)[0])
    right = torch.autograd.grad(want, whole, upstream)
    for one, other in zip((got, *found), (want, *right), strict=True):
        close(one.full_tensor(), other)


def test_compiled_sharded_attention(ranks: Ranks) -> None:
    ranks(compiled_values)


# ----------------------------------------------------------------- PyTorch's own cuDNN operators


def aten_values(heads: tuple[int, int, int], mask: str | None, placement: Placement) -> str:
    """What `F.scaled_dot_product_attention` calls on a GPU, called by name; where it put it."""
    aten_on_cpu.install()
    distributed.register()
    whole = [t.requires_grad_() for t in qkv(heads)]
    bias = None if mask is None else randn(*MASKS[mask])
    upstream = randn(B, heads[0], S, D)
    arguments = (True, 0.0, mask is None)
    want = cudnn_sdpa(*whole, bias, is_causal=mask is None, enable_gqa=True)
    right = torch.autograd.grad(want, whole, upstream)

    ranks = mesh()
    leaves = [t.requires_grad_() for t in shard([t.detach() for t in whole], ranks, placement)]
    placed = None if bias is None else shard([bias], ranks, WHOLE)[0]
    output, *_ = ATEN._scaled_dot_product_cudnn_attention(*leaves, placed, *arguments)
    found = torch.autograd.grad(output, leaves, shard([upstream], ranks, placement)[0])
    for got, expected in zip((output, *found), (want, *right), strict=True):
        close(got.full_tensor(), expected)
    return str(output.placements[0])


@pytest.mark.parametrize("placement", [BATCH, HEADS], ids=str)
@pytest.mark.parametrize("mask", [None, *(name for name in MASKS if name != "1d")])
def test_pytorchs_operators(ranks: Ranks, mask: str | None, placement: Placement) -> None:
    assert ranks(aten_values, (H, H, H), mask, placement) == [str(placement)] * 2


@pytest.mark.parametrize(
    ("heads", "expected"), [((4, 2, 2), HEADS), ((5, 5, 5), HEADS), ((12, 3, 3), WHOLE)], ids=str
)
def test_groups_of_heads_in_pytorchs_operators(
    ranks: Ranks, heads: tuple[int, int, int], expected: Placement
) -> None:
    assert ranks(aten_values, heads, None, HEADS) == [str(expected)] * 2


def aten_inference() -> None:
    aten_on_cpu.install()
    distributed.register()
    whole = qkv()
    for compute_lse in (True, False, True):
        with torch.no_grad():
            output, lse, *_ = ATEN._scaled_dot_product_cudnn_attention(
                *shard(whole, mesh(), HEADS), None, compute_lse
            )
        assert output.placements == (HEADS,)
        if compute_lse:
            assert lse.placements == (HEADS,) and lse.shape == (B, H, S, 1)
        close(output.full_tensor(), cudnn_sdpa(*whole))


def test_pytorchs_operator_without_a_log_sum_exp(ranks: Ranks) -> None:
    ranks(aten_inference)
