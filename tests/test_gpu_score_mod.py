"""Functions on the scores, on the GPU against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import CudnnSdpaUnsupportedError, cache_clear, cache_info, cudnn_sdpa, reference
from cudnn_mha.score_mod import ScoreMod
from tests.oracle import assert_right, ours
from tests.test_gpu_extended import BAND, SCORES, lens
from tests.test_gpu_values import BF16, FP16, FP32, call, randn

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def cap(score: Any, q_index: Any, kv_index: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def distance(score: Any, q_index: Any, kv_index: Any) -> Any:
    return score - 0.5 * torch.log(1 + abs(q_index - kv_index))


MODS: dict[str, ScoreMod] = {
    "cap": cap,
    "distance": distance,
    "capped distance": lambda s, q, k: 2 * torch.tanh(s / 2) - 0.02 * abs(q - k),
    "scaled": lambda s, q, k: 0.3 * s * torch.log(q + 2),
}
OPERATIONS: dict[str, ScoreMod] = {
    "add": lambda s, q, k: s + 0.01 * k + 1,
    "sub": lambda s, q, k: 1 - s - 0.01 * k,
    "mul": lambda s, q, k: s * (0.2 * s + 0.005 * k),
    "div": lambda s, q, k: s / (1 + 0.01 * k),
    "softsign": lambda s, q, k: 3 * s / (1 + abs(s)),
    "reciprocal": lambda s, q, k: s + 3 / (k + 1),
    "from a value": lambda s, q, k: 0.01 * k - s,
    "square": lambda s, q, k: 0.3 * s * s + s,
    "neg": lambda s, q, k: -s,
    "abs": lambda s, q, k: abs(s),
    "exp": lambda s, q, k: torch.exp(0.5 * s),
    "log": lambda s, q, k: torch.log(1 + s * s),
    "sqrt": lambda s, q, k: torch.sqrt(1 + s * s) + 0.1 * torch.sqrt(k),
    "tanh": lambda s, q, k: torch.tanh(s) * s,
    "sigmoid": lambda s, q, k: s * torch.sigmoid(s),
    "maximum": lambda s, q, k: torch.maximum(s, 0.01 * (k - q)),
    "minimum": lambda s, q, k: torch.minimum(2 * s, s * s - 1),
    "clamp": lambda s, q, k: torch.clamp(s, min=-0.7, max=0.9),
    "clipped distance": lambda s, q, k: s - 0.1 * torch.clamp(q - k, min=-16, max=16),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str) -> None:
    for lengths in ((200, 200), (100, 333)):
        assert_right(call((8, 2, 2), lengths, score_mod=OPERATIONS[name]))


@pytest.mark.parametrize("band", BAND)
@pytest.mark.parametrize("lengths", [(200, 200), (100, 333), (333, 100)], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_bands(name: str, lengths: tuple[int, int], band: str) -> None:
    options = BAND[band] | {"score_mod": MODS[name]}
    assert_right(call((8, 2, 2), lengths, **options))
    assert_right(call((8, 2, 2), lengths, **options), gradients=False)


@pytest.mark.parametrize("dims", [(8, 8), (40, 24), (20, 20), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    for mod in (cap, distance):
        assert_right(call((4, 2, 1), (200, 260), dims, dtype=dtype, score_mod=mod))


@pytest.mark.parametrize("scores", [name for name in SCORES if name != "plain"])
def test_soft_caps_and_alibi_come_after(scores: str) -> None:
    for options in (BAND["none"], BAND["causal"], BAND["bottom right both"]):
        for name in ("distance", "scaled"):
            assert_right(call(score_mod=MODS[name], **options, **SCORES[scores]))


def test_the_soft_cap_is_one() -> None:
    for options in (BAND["none"], BAND["causal window"]):
        case = call((8, 2, 2), deterministic=True, softcap=2.0, **options)
        case.grad_output = randn(2, 8, 200, 64)
        want = ours(case)
        del case.options["softcap"]
        got = ours(case, score_mod=cap)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_scaled_scores_are_what_it_gets() -> None:
    for scale in (0.3, -0.2):
        assert_right(call(scale=scale, score_mod=MODS["capped distance"]))


def test_one_query() -> None:
    for name in MODS:
        for keys in (300, 5000):
            case = call((8, 2, 2), (1, keys), (128, 128), score_mod=MODS[name])
            if "distance" in name:
                with pytest.raises(CudnnSdpaUnsupportedError, match="reads kv_index"):
                    ours(case, gradients=False)
                assert_right(case, gradients=False, fallback=True)
            else:
                assert_right(case, gradients=False)
        if "distance" not in name:
            assert_right(call((8, 2, 2), (1, 300), score_mod=MODS[name]))


@pytest.mark.parametrize("lengths", [(200, 333), (77, 192), (2, 64), (64, 320)], ids=str)
def test_what_lies_beyond_the_last_query_and_key_does_no_harm(lengths: tuple[int, int]) -> None:
    """Kernels compute whole tiles: there is no logarithm there, and scores are far above others."""
    seq_q, seq_kv = lengths
    mods: list[ScoreMod] = [
        lambda s, q, k: s + torch.log(seq_kv - k),
        lambda s, q, k: s * torch.log(1.5 + seq_kv - k) + torch.log(seq_q - q),
        lambda s, q, k: s - 150,
        lambda s, q, k: 0.1 * s - 100 + 0.01 * k,
    ]
    for mod in mods:
        assert_right(call(lengths=lengths, score_mod=mod))


@pytest.mark.parametrize("name", MODS)
def test_masks(name: str) -> None:
    mask = torch.rand(2, 1, 200, 260, device="cuda") < 0.8
    mask[:, :, 7] = False
    for given in (mask, randn(1, 4, 200, 260).requires_grad_()):
        for options in ({}, {"window": (33, 33)}):
            case = call(lengths=(200, 260), mask=given, score_mod=MODS[name], **options)
            assert_right(case, gradients=False)
            try:
                assert_right(case)
            except CudnnSdpaUnsupportedError as error:  # cuDNN 9.19 has no such backward for some
                assert {reason.rule for reason in error.reasons} == {"cudnn"}


@pytest.mark.parametrize("band", ["none", "causal", "bottom right both"])
def test_sinks(band: str) -> None:
    for name, queries in (("cap", 200), ("distance", 200), ("scaled", 1)):
        case = call((8, 2, 2), (queries, 300), score_mod=MODS[name], **BAND[band])
        case.sinks = torch.randn(8, device="cuda")
        if queries == 1 and band != "none":
            with pytest.raises(CudnnSdpaUnsupportedError, match="count keys wrong"):
                ours(case, gradients=False)
            assert_right(case, gradients=False, fallback=True)
        else:
            assert_right(case, gradients=queries > 1)


def test_dropout_drops_weights_of_the_new_scores() -> None:
    query, key = torch.zeros(2, 4, 16, 128, 128, device="cuda", dtype=FP16).unbind()
    value = torch.eye(128, device="cuda", dtype=FP16).expand(4, 16, 128, 128).contiguous()
    upstream = value.clone()
    value.requires_grad_()
    output = cudnn_sdpa(query, key, value, dropout_p=0.2, fallback=False, score_mod=distance)
    (gradient,) = torch.autograd.grad(output, value, upstream)
    assert torch.equal(output == 0, gradient.mT == 0)
    assert abs((output == 0).double().mean().item() - 0.2) < 0.005
    weights, _ = reference.attention(query, key, upstream, score_mod=distance)
    kept = output != 0
    torch.testing.assert_close(output[kept], weights[kept] / 0.8, rtol=5e-3, atol=1e-4)


def test_gradient_of_the_log_sum_exp() -> None:
    case = call((8, 2, 2), (200, 260), score_mod=MODS["capped distance"])
    found, wanted = case.leaves(), case.leaves(torch.float64)
    got, got_lse = cudnn_sdpa(*found, return_lse=True, fallback=False, **case.options)
    o = case.definition()
    want, lse = reference.attention(*wanted, compute_dtype=torch.float64, **o)
    upstream = torch.randn_like(want), torch.randn_like(lse)
    for one, other in zip(
        torch.autograd.grad((got * upstream[0]).sum() + (got_lse * upstream[1]).sum(), found),
        torch.autograd.grad((want * upstream[0]).sum() + (lse * upstream[1]).sum(), wanted),
        strict=True,
    ):
        assert (one.double() - other).norm() <= 1e-2 * other.norm() + 1e-3


def test_lengths_beside_it_fall_back() -> None:
    case = call(score_mod=distance, seq_lens_kv=lens(200, 33))
    with pytest.raises(CudnnSdpaUnsupportedError, match="score_operations"):
        ours(case)
    assert_right(case, fallback=True)


def test_other_dtypes_fall_back() -> None:
    query = randn(2, 4, 200, 64, dtype=FP32)
    got = cudnn_sdpa(query, query, query, score_mod=distance)
    want, _ = reference.attention(query, query, query, score_mod=distance)
    torch.testing.assert_close(got, want)


def test_functions_that_build_the_same_share_plans() -> None:
    cache_clear()
    leaves = [randn(2, 4, 200, 64).requires_grad_() for _ in range(3)]
    for bound in (2, 2.0, 3):
        output = cudnn_sdpa(
            *leaves, score_mod=lambda s, q, k, c=bound: c * torch.tanh(s / c), fallback=False
        )
        output.sum().backward()
    assert cache_info().builds == 4


def test_captured() -> None:
    query, key, value = (randn(2, 4, 128, 64) for _ in range(3))

    def run() -> Tensor:
        return cudnn_sdpa(query, key, value, score_mod=MODS["capped distance"], fallback=False)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    query.copy_(randn(2, 4, 128, 64))
    graph.replay()
    torch.testing.assert_close(captured, run(), rtol=0, atol=0)
