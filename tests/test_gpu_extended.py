"""What `F.scaled_dot_product_attention` cannot say, on the GPU against float64.

``CUDNN_MHA_CALLS`` sets how many random calls are made (default 240), ``CUDNN_MHA_SEED`` which.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import CudnnSdpaUnsupportedError, cudnn_sdpa, merge, padded, reference
from cudnn_mha.routes import Manner
from tests.oracle import Call, assert_right, failures, ours
from tests.test_gpu_values import BF16, FP16, call, randn

pytestmark = pytest.mark.gpu

CALLS = int(os.environ.get("CUDNN_MHA_CALLS", "240"))
SEED = int(os.environ.get("CUDNN_MHA_SEED", "0"))
CHUNKS = 24


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def lens(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def spoiled(case: Call) -> Call:
    """The call with NaN in all of its padding, that of the output's gradient too."""
    query, key, value = (t.clone() for t in (case.query, case.key, case.value))
    case.grad_output = torch.randn(*query.shape[:-1], value.shape[-1], device="cuda").to(
        query.dtype
    )
    sides = (
        ("seq_lens_q", (query, case.grad_output)),
        ("seq_lens_kv", (key, value)),
    )
    for name, tensors in sides:
        lengths = case.options.get(name)
        if lengths is None:
            continue
        for tensor in tensors:
            beyond = torch.arange(tensor.shape[2], device="cuda") >= lengths[:, None]
            tensor.masked_fill_(beyond[:, None, :, None], torch.nan)
    case.query, case.key, case.value = query, key, value
    return case


BAND: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "left": {"window": (33, -1)},
    "right": {"window": (-1, 20)},
    "both": {"window": (33, 20)},
    "one key": {"window": (0, 0)},
    "causal window": {"is_causal": True, "window": (33, 0)},
    "bottom right window": {
        "is_causal": True,
        "window": (33, -1),
        "causal_alignment": "bottom_right",
    },
    "bottom right both": {"window": (33, 20), "causal_alignment": "bottom_right"},
}
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "softcap and alibi": {"softcap": 2.0, "alibi": True},
}


def right_or_refused(case: Call, *, gradients: bool = True, **options: Any) -> None:
    """Right values, or the refusal that operations on the scores get beside lengths."""
    o = case.options
    causal = o.get("is_causal") or o.get("window", (0, -1))[1] == 0
    own = causal and "causal_alignment" not in o and not o.get("softcap")
    if o.get("softcap") or (o.get("alibi") and not own):
        with pytest.raises(CudnnSdpaUnsupportedError, match="score_operations"):
            assert_right(case, gradients=gradients, **options)
        assert_right(case, gradients=gradients, **options, fallback=True)
    else:
        assert_right(case, gradients=gradients, **options)


@pytest.fixture(params=["by choice", "cleaned"])
def manner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lengths told as chosen for this GPU, and as for those on which nothing was seen."""
    if request.param == "cleaned":
        chosen = padded._manner

        def cleaned(spec: Any, given: Any, *rest: Any) -> Manner:
            return Manner.CLEANED if given.has_lengths else chosen(spec, given, *rest)

        monkeypatch.setattr(padded, "_manner", cleaned)
        padded._routes.clear()
    return str(request.param)


@pytest.mark.parametrize("band", BAND)
@pytest.mark.parametrize("lengths", [(200, 200), (100, 333), (333, 100)], ids=str)
@pytest.mark.parametrize("scores", SCORES)
def test_bands(band: str, lengths: tuple[int, int], scores: str) -> None:
    options = BAND[band] | SCORES[scores]
    assert_right(call((8, 2, 2), lengths, **options))
    assert_right(call((8, 2, 2), lengths, **options), gradients=False)


@pytest.mark.parametrize("band", BAND)
@pytest.mark.parametrize("scores", SCORES)
def test_padding(band: str, scores: str, manner: str) -> None:
    """Values of sequences of any length, zeros beyond them, whatever the padding holds."""
    options = BAND[band] | SCORES[scores]
    for lengths_q, lengths_kv in (
        ((100, 250, 1), (201, 77, 130)),
        ((0, 250, 10), (10, 77, 0)),
        (None, (201, 77, 130)),
    ):
        for heads, dim in (((4, 4, 4), 64), ((8, 2, 2), 128)):
            case = call(heads, (250, 201), (dim, dim), 3, **options)
            if lengths_q is not None:
                case.options["seq_lens_q"] = lens(*lengths_q)
            case.options["seq_lens_kv"] = lens(*lengths_kv)
            right_or_refused(spoiled(case))
            right_or_refused(case, gradients=False)


@pytest.mark.parametrize("dims", [(8, 8), (40, 24), (64, 128), (20, 20), (192, 128), (256, 256)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_padding_in_every_layout(
    dims: tuple[int, int], order: tuple[int, ...], manner: str
) -> None:
    case = call((4, 2, 1), (130, 260), dims, 3, dtype=FP16, is_causal=True)
    case.options |= {"seq_lens_q": lens(130, 7, 64), "seq_lens_kv": lens(260, 1, 129).long()}
    back = [order.index(d) for d in range(4)]
    for name in ("query", "key", "value"):
        tensor = getattr(case, name)
        setattr(case, name, tensor.permute(order).contiguous().permute(back))
    assert_right(case)


@pytest.mark.parametrize("heads", [(4, 4, 4), (12, 3, 3), (8, 1, 1)], ids=str)
@pytest.mark.parametrize("band", BAND)
@pytest.mark.parametrize("scores", ["plain", "alibi"])
def test_decoding(heads: tuple[int, int, int], band: str, scores: str) -> None:
    """One query against a cache that is longer than what it holds."""
    for lengths in ((700, 1, 129, 64), (0, 1, 1024, 333), (0, 0, 0, 1)):
        for dim in (64, 128):
            case = call(heads, (1, 1024), (dim, dim), 4, **BAND[band], **SCORES[scores])
            case.options["seq_lens_kv"] = lens(*lengths)
            right_or_refused(spoiled(case), gradients=False)
            right_or_refused(case)


@pytest.mark.parametrize("band", BAND)
@pytest.mark.parametrize("scores", ["plain", "softcap"])
@pytest.mark.parametrize("padded", [False, True])
def test_sinks(band: str, scores: str, padded: bool) -> None:
    for lengths in ((200, 200), (2, 300)):
        case = call((8, 2, 2), lengths, batch=3, **BAND[band], **SCORES[scores])
        case.sinks = torch.randn(8, device="cuda")
        if padded:
            case.options["seq_lens_q"] = lens(1, lengths[0], 0)
            case.options["seq_lens_kv"] = lens(lengths[1], 5, 77)
            case = spoiled(case)
        check = right_or_refused if padded else assert_right
        check(case)
        check(case, gradients=False)


@pytest.mark.parametrize("scores", ["plain", "softcap"])
def test_sinks_of_one_query(scores: str) -> None:
    for lengths in ({}, {"seq_lens_kv": lens(300, 0, 7)}, {"seq_lens_q": lens(1, 0, 1)}):
        case = call((8, 2, 2), (1, 300), batch=3, **SCORES[scores], **lengths)
        case.sinks = torch.randn(8, device="cuda", dtype=BF16)
        check = right_or_refused if lengths else assert_right
        check(spoiled(case), gradients=False)


def test_given_slopes() -> None:
    slopes = torch.rand(4, device="cuda")
    for options in (BAND["none"], BAND["causal"], BAND["bottom right"], SCORES["softcap"]):
        assert_right(call(lengths=(150, 220), alibi_slopes=slopes, **options))


@pytest.mark.parametrize("heads", [6, 8, 12])
def test_alibi_for_any_number_of_heads(heads: int) -> None:
    for options in (BAND["causal"], BAND["none"]):
        assert_right(call((heads, heads, heads), alibi=True, **options))


def test_masks_beside_lengths_and_windows() -> None:
    mask = torch.rand(3, 1, 200, 260, device="cuda") < 0.8
    bias = randn(1, 4, 200, 260).requires_grad_()
    for given in (mask, bias):
        case = call(lengths=(200, 260), batch=3, mask=given)
        case.options |= {"seq_lens_q": lens(200, 7, 64), "seq_lens_kv": lens(260, 1, 129)}
        assert_right(case)
        assert_right(call(lengths=(200, 260), batch=3, mask=given, window=(33, 33)))


def test_bit_equal_gradients() -> None:
    case = call((8, 2, 2), (300, 300), batch=8, is_causal=True, deterministic=True)
    case.options["seq_lens_kv"] = case.options["seq_lens_q"] = lens(*range(20, 300, 35))
    case.grad_output = randn(8, 8, 300, 64)
    first = ours(case)
    for _ in range(5):
        again = ours(case)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_dropout_with_lengths() -> None:
    """Dropped weights are dropped in the backward too, at the rate that was asked for."""
    query, key = torch.zeros(2, 4, 16, 128, 128, device="cuda", dtype=FP16).unbind()
    value = torch.eye(128, device="cuda", dtype=FP16).expand(4, 16, 128, 128).contiguous()
    upstream = value.clone()
    value.requires_grad_()
    output = cudnn_sdpa(
        query, key, value, dropout_p=0.2, fallback=False, seq_lens_kv=lens(128, 128, 64, 128)
    )
    (gradient,) = torch.autograd.grad(output, value, upstream)
    assert torch.equal(output == 0, gradient.mT == 0)
    whole = output[:2]
    assert abs((whole == 0).double().mean().item() - 0.2) < 0.005
    assert (output[2, :, :, 64:] == 0).all()


LSE_CALLS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "causal": {"is_causal": True},
    "window": {"window": (33, 20)},
    "soft cap": {"softcap": 2.0},
    "lengths": {"seq_lens_q": [200, 0, 77], "seq_lens_kv": [260, 9, 0]},
}


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 24)], ids=str)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", LSE_CALLS)
def test_gradient_of_the_log_sum_exp(name: str, both: bool, dims: tuple[int, int]) -> None:
    """Alone, and together with that of the output."""
    options = {k: lens(*v) if "lens" in k else v for k, v in LSE_CALLS[name].items()}
    case = call((8, 2, 2), (200, 260), dims, 3, **options)
    case.sinks = torch.randn(8, device="cuda") if name == "window" else None
    found, wanted = case.leaves(), case.leaves(torch.float64)
    got, got_lse = cudnn_sdpa(
        *found[:3], return_lse=True, fallback=False, **case.options, **case._sinks(found)
    )
    o = case.definition() | case._sinks(wanted)
    want, lse = reference.attention(*wanted[:3], compute_dtype=torch.float64, **o)
    real = lse.isfinite()
    upstream = torch.randn_like(want) * both, torch.randn_like(lse)
    pairs = []
    for output, sums, leaves in ((got, got_lse, found), (want, lse, wanted)):
        loss = (output * upstream[0]).sum() + (sums.where(real, 0.0) * upstream[1]).sum()
        pairs.append(torch.autograd.grad(loss, leaves))
    for one, other in zip(*pairs, strict=True):
        assert (one.double() - other).norm() <= 1e-2 * other.norm() + 1e-3


def test_keys_in_pieces_are_the_whole() -> None:
    """Forward and backward: merged by the log-sum-exps, the gradients go through these."""
    case = call((8, 2, 2), (256, 384), (128, 128), 2)
    leaves, exact = case.leaves(), case.leaves(torch.float64)
    parts = [
        cudnn_sdpa(leaves[0], k, v, enable_gqa=True, return_lse=True, fallback=False)
        for k, v in zip(leaves[1].chunk(3, 2), leaves[2].chunk(3, 2), strict=True)
    ]
    output, lse = merge([part[0] for part in parts], [part[1] for part in parts])
    want, sums = reference.attention(*exact, compute_dtype=torch.float64)
    assert (output.double() - want).norm() <= 4e-3 * want.norm()
    assert (lse.double() - sums).abs().max() <= 2e-3
    upstream = torch.randn_like(want)
    found = torch.autograd.grad(output, leaves, upstream.float())
    for one, other in zip(found, torch.autograd.grad(want, exact, upstream), strict=True):
        assert (one.double() - other).norm() <= 1e-2 * other.norm()


def test_a_low_mask_row_beside_a_sink() -> None:
    """All weight goes to the sink where every key's score is far below it."""
    for queries in (200, 1):
        bias = torch.zeros(1, 1, queries, 300, device="cuda")
        bias[:, :, -1] = -2e4
        case = call((4, 4, 4), (queries, 300), mask=bias)
        case.sinks = torch.zeros(4, device="cuda")
        assert_right(case, gradients=False)


def test_one_plan_for_many_lengths() -> None:
    """Lengths cost no plan of their own, and neither does padding to another length."""
    from cudnn_mha import cache_clear, cache_info

    cache_clear()
    for length in range(130, 256, 9):
        case = call(lengths=(length, length), batch=2, is_causal=True)
        case.query, case.key, case.value = (
            t.transpose(1, 2).contiguous().transpose(1, 2)
            for t in (case.query, case.key, case.value)
        )
        case.options["seq_lens_q"] = case.options["seq_lens_kv"] = lens(length, length // 2)
        assert_right(case)
    assert cache_info().builds == 2


def test_captured_with_lengths_that_change() -> None:
    query, key, value = (randn(2, 4, 128, 64) for _ in range(3))
    lengths = lens(128, 128)

    def run() -> Tensor:
        return cudnn_sdpa(query, key, value, seq_lens_kv=lengths, fallback=False)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for new in ((3, 100), (128, 1)):
        lengths.copy_(lens(*new))
        graph.replay()
        torch.testing.assert_close(captured, run(), rtol=0, atol=0)


def test_what_cudnn_refuses_says_why() -> None:
    with pytest.raises(CudnnSdpaUnsupportedError, match="Bottom right causal mask"):
        cudnn_sdpa(
            randn(2, 4, 64, 64),
            randn(2, 4, 80, 64),
            randn(2, 4, 80, 64),
            dropout_p=0.25,
            is_causal=True,
            causal_alignment="bottom_right",
            fallback=False,
        )


def random_call(rng: random.Random) -> Call:
    dtype = rng.choice([BF16, FP16])
    batch = rng.choice([1, 2, 3, 5])
    heads_kv = rng.choice([1, 2, 3])
    heads = heads_kv * rng.choice([1, 1, 2, 4])
    lengths = rng.choice([1, 2, 17, 64, 128, 200, 255, 384]), rng.choice([1, 16, 64, 129, 192, 500])
    dim = rng.choice([8, 32, 40, 64, 64, 128, 128, 192, 256])
    case = call((heads, heads_kv, heads_kv), lengths, (dim, dim), batch, dtype)
    if rng.random() < 0.5:
        case.query, case.key, case.value = (
            t.transpose(1, 2).contiguous().transpose(1, 2)
            for t in (case.query, case.key, case.value)
        )
    options = case.options
    options |= rng.choice([{}, *BAND.values()])
    if rng.random() < 0.25:
        options["window"] = (rng.choice([-1, 0, 5, 100]), rng.choice([-1, 0, 7]))
    if rng.random() < 0.25:
        options["softcap"] = rng.choice([0.5, 5.0, 50.0])
    if rng.random() < 0.2:
        options["alibi"] = True
    if rng.random() < 0.25:
        case.sinks = torch.randn(heads, device="cuda") * rng.choice([1, 5])
    for name, longest in zip(("seq_lens_q", "seq_lens_kv"), lengths, strict=True):
        if rng.random() < 0.6:
            choice = [rng.choice([0, 1, longest, rng.randint(0, longest)]) for _ in range(batch)]
            options[name] = lens(*choice)
    return spoiled(case) if rng.random() < 0.5 else case


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_calls(chunk: int) -> None:
    wrong = []
    for number in range(chunk, CALLS, CHUNKS):
        rng = random.Random(SEED * 1_000_003 + number)
        torch.manual_seed(rng.getrandbits(32))
        case = random_call(rng)
        gradients = rng.random() < 0.7
        try:
            found = failures(case, gradients=gradients)
        except CudnnSdpaUnsupportedError as error:
            # Only what cuDNN itself refuses, and says so.
            rules = {reason.rule for reason in error.reasons}
            known = {"cudnn", "single_token", "score_operations"}
            if case.query.shape[2] == 1 and gradients:
                known.add("sinks_single_query")
            found = [] if rules <= known else [str(error)]
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            shapes = [tuple(t.shape) for t in (case.query, case.key, case.value)]
            wrong.append(f"{number}: {shapes} {case.query.dtype} {case.options}: {found}")
    assert not wrong, "\n".join(wrong)
