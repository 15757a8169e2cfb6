"""Dense calls of many lengths on few plans, on the GPU against float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cudnn_mha
from cudnn_mha import cache_clear, cache_info, config, cudnn_sdpa, lengths
from tests.oracle import Call, assert_right
from tests.test_gpu_values import FP16, call, randn

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    torch.manual_seed(0)
    monkeypatch.setenv(config.LENGTHS, "bucketed")
    config.reload()
    cache_clear()
    lengths.met.clear()
    yield monkeypatch
    monkeypatch.undo()
    config.reload()
    cache_clear()
    lengths.met.clear()


def by_token(case: Call) -> Call:
    """The call with heads that lie within a token."""
    case.query, case.key, case.value = (
        t.transpose(1, 2).contiguous().transpose(1, 2) for t in (case.query, case.key, case.value)
    )
    return case


HEADS = {"by token": [(4, 4, 4), (8, 2, 2), (6, 1, 3)], "by head": [(4, 4, 4)]}
LENGTHS = [(130, 130), (255, 200), (2, 256), (129, 131), (200, 129), (1, 140), (17, 255)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (256, 256)], ids=str)
@pytest.mark.parametrize(("way", "heads"), [(w, h) for w in HEADS for h in HEADS[w]], ids=str)
def test_right_values_from_two_plans(
    way: str, heads: tuple[int, int, int], dims: tuple[int, int], causal: bool
) -> None:
    """Lengths that share the buckets of queries and of keys."""
    buckets = set()
    for pair in LENGTHS:
        case = call(heads, pair, dims, is_causal=causal)
        case.options["enable_gqa"] = True
        assert_right(by_token(case) if way == "by token" else case)
        buckets.add(tuple(max(128, 1 << (n - 1).bit_length()) for n in pair))
    assert cache_info().builds == 2 * len(buckets)


@pytest.mark.parametrize("heads", [(4, 4, 4), (8, 2, 2), (8, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16], ids=str)
def test_a_cache_that_grows(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Decoding with keys and values that are a token longer in every step."""
    options: dict[str, Any] = {"enable_gqa": True, "fallback": False}
    with torch.no_grad():
        for length in (130, 131, 177, 256):
            case = call(heads, (1, length), (128, 128), 3, dtype)
            got = cudnn_sdpa(case.query, case.key, case.value, **options)
            with sdpa_kernel(SDPBackend.MATH):
                want = F.scaled_dot_product_attention(
                    *(t.double() for t in (case.query, case.key, case.value)), enable_gqa=True
                )
            error = (got.double() - want).norm() / want.norm()
            assert error < (1e-3 if dtype == FP16 else 6e-3)
    assert cache_info().builds == 1


def test_views_of_a_projection_and_odd_gradients() -> None:
    for length in (140, 200):
        qkv = randn(2, length, 3, 4, 64)
        case = call(lengths=(length, length), is_causal=True)
        case.query, case.key, case.value = qkv.permute(2, 0, 3, 1, 4).unbind()
        case.grad_output = randn(2, 4, length, 64)  # head by head, the output token by token
        assert_right(case)
        leaves = case.leaves()
        cudnn_sdpa(*leaves, is_causal=True, fallback=False).sum().backward()
        assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)
    assert cache_info().builds == 2


def test_pytorchs_own_function() -> None:
    """The override keeps PyTorch's conventions: log-sum-exp and strides as ever."""
    with cudnn_mha.enabled():
        for length in (140, 200):
            case = by_token(call((8, 2, 2), (length, length)))
            leaves = case.leaves()
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                output = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
            grads = torch.autograd.grad(output, leaves, torch.ones_like(output))
            with sdpa_kernel(SDPBackend.MATH):
                exact = [t.detach().double().requires_grad_() for t in leaves]
                want = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
            rights = torch.autograd.grad(want, exact, torch.ones_like(want))
            for got, right in zip((output, *grads), (want, *rights), strict=True):
                assert (got.double() - right).norm() < 0.006 * right.norm()
            raw = torch.ops.aten._scaled_dot_product_cudnn_attention(*leaves, None, True)
            assert raw[1].is_contiguous() and raw[1].shape == (2, 8, length, 1)
    assert cache_info().builds == 4  # the raw call is not causal


def test_a_few_lengths_get_plans_of_their_own(mode: pytest.MonkeyPatch) -> None:
    mode.setenv(config.LENGTHS, "auto")
    config.reload()
    rng = random.Random(0)
    for length in [200, 300, 200, 400, 500, *(rng.randint(129, 1024) for _ in range(20)), 300]:
        assert_right(by_token(call(lengths=(length, length), is_causal=True)))
    # The gradient of the output lies head by head: own plans are made for that layout as well.
    assert cache_info().builds == 3 * lengths.FEW + 2 * 3


def test_captured_graphs_keep_what_plans_are_told() -> None:
    query, key, value = (randn(2, 4, 150, 64) for _ in range(3))

    def run() -> Tensor:
        return cudnn_sdpa(query, key, value, is_causal=True, fallback=False)

    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    cache_clear()
    for _ in range(50):  # whatever was freed is written over
        torch.full((64,), -1, device="cuda", dtype=torch.int64)
    graph.replay()
    torch.testing.assert_close(captured, want, rtol=0, atol=0)
