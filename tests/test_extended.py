"""Lengths, windows, alignment, soft caps, ALiBi and sinks on a machine without a GPU.

On the CPU the calls fall back; `machine` has them decided for a GPU, and interprets its plans.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import (
    CudnnSdpaUnsupportedError,
    cudnn_sdpa,
    devices,
    dispatch,
    merge,
    padded,
    reference,
)
from cudnn_mha.cache import Slot
from cudnn_mha.checks import Reason
from cudnn_mha.graph_builder import Uid
from cudnn_mha.inputs import Options, Outline
from cudnn_mha.routes import Given, Manner, Route, find_plans
from cudnn_mha.spec import AttentionSpec
from cudnn_mha.terms import Terms, make_terms
from tests import interpreter
from tests.support import BHSD, BSHD, PROFILES, attention, refusal

B, H, SQ, SKV, D = 3, 4, 5, 7, 8


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def qkv(
    lengths: tuple[int, int] = (SQ, SKV),
    heads: tuple[int, int, int] = (H, H, H),
    dims: tuple[int, int] = (D, D + 8),
    dtype: torch.dtype = torch.float64,
    order: tuple[int, ...] = BHSD,
    lead: tuple[int, ...] = (B,),
) -> list[Tensor]:
    found = []
    sizes = zip(heads, (lengths[0], lengths[1], lengths[1]), (dims[0], *dims), strict=True)
    for own, length, dim in sizes:
        tensor = torch.randn(*lead, own, length, dim).to(dtype)
        if lead:
            back = [order.index(d) for d in range(4)]
            tensor = tensor.permute(order).contiguous().permute(back)
        found.append(tensor.requires_grad_())
    return found


BAND: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "left": {"window": (2, -1)},
    "right": {"window": (-1, 1)},
    "one key": {"window": (0, 0)},
    "causal window": {"is_causal": True, "window": (2, 5)},
    "bottom right window": {
        "is_causal": True,
        "window": (3, -1),
        "causal_alignment": "bottom_right",
    },
    "bottom right both": {"window": (2, 1), "causal_alignment": "bottom_right"},
}
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "softcap and alibi": {"softcap": 1.5, "alibi": True},
}
LENGTHS: dict[str, dict[str, Any]] = {
    "full": {},
    "keys": {"seq_lens_kv": lens(7, 1, 4)},
    "queries": {"seq_lens_q": lens(5, 2, 1)},
    "both": {"seq_lens_q": lens(5, 2, 3), "seq_lens_kv": lens(4, 7, 1)},
    "empty": {"seq_lens_q": lens(0, 5, 3), "seq_lens_kv": lens(4, 0, 7)},
    "beyond": {"seq_lens_q": lens(9, -2, 5).long(), "seq_lens_kv": lens(8, 3, -1).long()},
}


def from_definition(
    leaves: list[Tensor], options: dict[str, Any], mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the reference, in its own words."""
    o = dict(options)
    query, key = leaves[:2]
    slopes = o.pop("alibi_slopes", None)
    if o.pop("alibi", False) and slopes is None:
        slopes = reference.alibi_slopes(query.shape[-3]).to(query.dtype)
    for name, tensor in (("seq_lens_q", query), ("seq_lens_kv", key)):
        if name in o:
            o[name] = o[name].clamp(0, tensor.shape[-2])
    window = o.pop("window", (-1, -1))
    if o.get("is_causal"):
        window = (window[0], -1)  # the causal mask is tighter
    bottom_right = o.pop("causal_alignment", "top_left") == "bottom_right"
    o.pop("enable_gqa", None)
    o.pop("fallback", None)
    return reference.attention(
        *leaves[:3],
        mask,
        alibi_slopes=slopes,
        window=window,
        bottom_right=bottom_right,
        sinks=leaves[3] if len(leaves) > 3 else None,
        **o,
    )


def spoiled(leaves: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The tensors with NaN in the padding."""
    found = []
    names = ("seq_lens_q", "seq_lens_kv", "seq_lens_kv")
    for tensor, name in zip(leaves[:3], names, strict=True):
        tensor = tensor.detach().clone(memory_format=torch.preserve_format)
        if name in options:
            beyond = torch.arange(tensor.shape[2]) >= options[name][:, None]
            tensor.masked_fill_(beyond[:, None, :, None], math.nan)
        found.append(tensor.requires_grad_())
    return [*found, *leaves[3:]]


def assert_right(
    leaves: list[Tensor],
    options: dict[str, Any],
    mask: Tensor | None = None,
    *,
    tolerance: float = 1e-6,
    gradients: bool = True,
) -> None:
    """Output, log-sum-exp and gradients, also where the padding holds NaN."""
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want, sums = from_definition(exact, options, None if mask is None else mask.double())
    upstream = torch.randn(want.shape).to(leaves[0].dtype)
    leaves = spoiled(leaves, options)
    with torch.set_grad_enabled(gradients):
        sinks = {"sinks": leaves[3]} if len(leaves) > 3 else {}
        got, lse = cudnn_sdpa(*leaves[:3], mask, return_lse=True, **options, **sinks)
        alone = cudnn_sdpa(*leaves[:3], mask, **options, **sinks)
    assert (got.dtype, lse.dtype) == (leaves[0].dtype, torch.float32)

    def close(one: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)

    close(got, want)
    close(alone, want)
    close(lse, sums)
    if not gradients:
        return
    wanted = torch.autograd.grad(want, exact, upstream.double())
    if "seq_lens_q" in options:  # what comes from behind the end means nothing
        beyond = torch.arange(want.shape[2]) >= options["seq_lens_q"][:, None]
        upstream = upstream.masked_fill(beyond[:, None, :, None], math.nan)
    for one, other in zip(torch.autograd.grad(got, leaves, upstream), wanted, strict=True):
        close(one, other)


# -------------------------------------------------------------------------------- the fallback


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("band", BAND)
def test_fallback(band: str, scores: str, lengths: str) -> None:
    options = BAND[band] | SCORES[scores] | LENGTHS[lengths]
    assert_right([*qkv(heads=(4, 2, 1)), torch.randn(4).requires_grad_()], options | GQA)


GQA = {"enable_gqa": True}


def test_fallback_without_sinks_and_groups() -> None:
    for options in (*BAND.values(), *SCORES.values(), *LENGTHS.values()):
        assert_right(qkv(), options)


def test_fallback_with_slopes_scale_and_mask() -> None:
    slopes = torch.rand(H, dtype=torch.float64)
    assert_right(qkv(), {"alibi_slopes": slopes})
    assert_right(qkv(), {"alibi_slopes": slopes, "alibi": True, "scale": -0.3} | BAND["left"])
    bias = torch.randn(1, H, SQ, SKV)
    assert_right(qkv(), BAND["left"] | LENGTHS["both"], bias)


def test_fallback_of_one_sequence_without_a_batch() -> None:
    for options in (BAND["causal window"], {"softcap": 2.0}, {"alibi": True}):
        leaves = qkv(lead=())
        got, lse = cudnn_sdpa(*leaves, return_lse=True, seq_lens_kv=lens(4), **options)
        batched = [t[None] for t in leaves]
        want, sums = from_definition(batched, {"seq_lens_kv": lens(4)} | options)
        torch.testing.assert_close(got, want[0])
        torch.testing.assert_close(lse.double(), sums[0], rtol=1e-6, atol=1e-6)
        assert (got.shape, lse.shape) == ((H, SQ, D + 8), (H, SQ))


def test_one_batch_entry_serves_all() -> None:
    query, key, value = qkv()
    options = {"seq_lens_kv": lens(7, 1, 4)}
    got = cudnn_sdpa(query[:1], key, value, **options)
    want, _ = from_definition([query[:1], key, value], options)
    torch.testing.assert_close(got, want)


def test_one_query_head_serves_all() -> None:
    """As PyTorch's function lets batch and heads broadcast."""
    query, key, value = qkv()
    sinks, slopes = torch.randn(H).double(), torch.rand(H).double()
    options = {"alibi_slopes": slopes, "seq_lens_kv": lens(7, 1, 4)}
    got = cudnn_sdpa(query[:, :1], key, value, sinks=sinks, **options)
    repeated = query[:, :1].expand(-1, H, -1, -1)
    want, _ = from_definition([repeated, key, value, sinks], options)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "options", [{}, {"enable_gqa": True}, {"softcap": 1.5}, {"seq_lens_kv": lens(7, 1, 4)}]
)
def test_the_log_sum_exp_is_float32_of_any_dtype(options: dict[str, Any]) -> None:
    leaves = qkv()
    output, lse = cudnn_sdpa(*leaves, return_lse=True, **options)
    _, want = from_definition(leaves, options)
    assert (output.dtype, lse.dtype, want.dtype) == (torch.float64, torch.float32, torch.float64)
    assert torch.equal(lse, want.float())


def test_parts_merge_to_the_whole_with_their_gradients() -> None:
    """Where PyTorch computes, the log-sum-exp has a gradient, which the parts' weights are."""
    leaves = qkv()
    query, key, value = leaves
    parts = [
        cudnn_sdpa(query, key[:, :, a:b], value[:, :, a:b], softcap=3.0, return_lse=True)
        for a, b in ((0, 2), (2, SKV))
    ]
    outputs, lses = zip(*parts, strict=True)
    merged, lse = merge(outputs, lses)
    want, sums = cudnn_sdpa(*leaves, softcap=3.0, return_lse=True)
    torch.testing.assert_close(merged, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.float(), sums, rtol=1e-6, atol=1e-6)
    upstream = torch.randn_like(want)
    grads = torch.autograd.grad(merged, leaves, upstream)
    for got, right in zip(grads, torch.autograd.grad(want, leaves, upstream), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)


def test_dropout_drops_weights() -> None:
    query, key, _ = qkv()
    value = torch.eye(SKV, dtype=torch.float64).expand(B, H, SKV, SKV)
    output = cudnn_sdpa(query, key, value, dropout_p=0.5, softcap=1.5, seq_lens_kv=lens(7, 7, 3))
    weights, _ = from_definition(
        [query, key, value], {"softcap": 1.5, "seq_lens_kv": lens(7, 7, 3)}
    )
    kept = output != 0
    assert 0.3 < kept[:2].double().mean() < 0.7
    torch.testing.assert_close(output[kept], 2 * weights[kept])


def test_without_a_fallback_every_reason_is_raised() -> None:
    with pytest.raises(CudnnSdpaUnsupportedError) as caught:
        cudnn_sdpa(*qkv(), window=(1, 1), seq_lens_kv=lens(1, 2, 3), fallback=False)
    assert [reason.rule for reason in caught.value.reasons] == ["device"]
    assert "must be on a CUDA device, got cpu" in str(caught.value)
    assert "lengths_kv=(3,):torch.int32" in str(caught.value)


# ----------------------------------------------------------------------------------- validation

META = torch.empty(B, device="meta", dtype=torch.int32)

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"seq_lens_q": [1, 2, 3]}, TypeError, "seq_lens_q must be a torch.Tensor or None, got list"),
    ({"seq_lens_kv": 3}, TypeError, "seq_lens_kv must be a torch.Tensor or None, got int"),
    ({"alibi_slopes": 1.0}, TypeError, "alibi_slopes must be a torch.Tensor or None, got float"),
    ({"sinks": "x"}, TypeError, "sinks must be a torch.Tensor or None, got str"),
    ({"seq_lens_q": lens(1, 2)}, ValueError, r"seq_lens_q must be of shape \(3,\), got \(2,\)"),
    (
        {"seq_lens_kv": lens(1, 2, 3)[None]},
        ValueError,
        r"seq_lens_kv must be of shape \(3,\), got \(1, 3\)",
    ),
    ({"seq_lens_q": torch.ones(3)}, TypeError, "seq_lens_q must be int32 or int64, got torch.flo"),
    ({"seq_lens_kv": lens(1, 1, 1).short()}, TypeError, "seq_lens_kv must be int32 or int64, got"),
    ({"seq_lens_kv": META}, RuntimeError, "seq_lens_kv must be on the device of query, cpu, got m"),
    ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes must be of shape \(4,\), got"),
    ({"alibi_slopes": torch.ones(4).int()}, TypeError, "alibi_slopes must be of a floating-point"),
    (
        {"alibi_slopes": torch.ones(4, requires_grad=True)},
        ValueError,
        "alibi_slopes has no gradient; detach it",
    ),
    ({"sinks": torch.ones(1)}, ValueError, r"sinks must be of shape \(4,\), got \(1,\)"),
    ({"sinks": torch.ones(4).bool()}, TypeError, "sinks must be of a floating-point dtype"),
    ({"window": (1, -5)}, ValueError, "window must hold -1"),
    ({"softcap": -1}, ValueError, "softcap must be positive"),
    ({"alibi": 0}, TypeError, "alibi must be True or False, got 0"),
    ({"causal_alignment": "middle"}, ValueError, "causal_alignment must be one of"),
    ({"window": (1, 1), "dropout_p": 2.0}, ValueError, r"dropout_p must be in \[0, 1\], got 2.0"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_what_means_nothing_is_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        cudnn_sdpa(*qkv(), **options)


def test_tensors_that_do_not_fit() -> None:
    query, key, value = qkv()
    with pytest.raises(ValueError, match="key and value must have the same length"):
        cudnn_sdpa(query, key, value[:, :, 1:], window=(1, 1))
    with pytest.raises(RuntimeError, match="attn_mask must be None when is_causal is set"):
        mask = torch.ones(SQ, SKV, dtype=torch.bool)
        cudnn_sdpa(query, key, value, mask, is_causal=True, window=(1, 1))


@pytest.mark.parametrize("lead", [None, (2, B)])
def test_other_numbers_of_dimensions(lead: tuple[int, ...] | None) -> None:
    query, key, value = qkv()
    if lead is None:
        query, key, value = query[0, 0], key[0, 0], value[0, 0]
    else:
        query, key, value = (t.expand(2, *t.shape) for t in (query, key, value))
    with pytest.raises(ValueError, match=f"must have 3 or 4 dimensions, got {query.dim()}"):
        cudnn_sdpa(query, key, value, window=(1, 1))


# --------------------------------------------------------------------------------------- routes


def route(
    profile: str,
    options: Options | None = None,
    terms: Terms | None = None,
    *,
    gradient: bool = False,
    lengths: tuple[int, int] = (128, 128),
    dims: tuple[int, int] = (64, 64),
    order: tuple[int, ...] = BSHD,
    **given: Any,
) -> Route:
    """How a call of these shapes is computed on a described GPU, by cuDNN's own answer."""
    tensors = qkv(lengths, dims=dims, dtype=torch.float16, order=order)
    tensors = [t.detach().to("meta") for t in tensors]
    device = devices.described(profile)
    call = Given(*tensors, **given), options or Options(), terms or Terms(), gradient
    found = padded.describe(*call, device)
    find_plans(found)
    return found


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether cuDNN proposes plans decides, and none is compiled."""

    def find_plan(spec: AttentionSpec, device: Any, limit: int | None) -> Any:
        words = refusal(spec, device)
        if words is not None:
            return None, (Reason("cudnn", f"cuDNN: {words}"),)
        plan: Any = type("Proposed", (), {"spec": spec})
        return Slot(plan), ()

    monkeypatch.setattr(dispatch, "find_plan", find_plan)


SLEN = torch.empty(B, dtype=torch.int32, device="meta")
HEADS = torch.empty(H, device="meta")
BOTTOM = Terms(None, 0, True)
ALIBI = Terms(None, 0, alibi=True)
DROPOUT = Options(dropout_p=0.1)

MANNERS: list[tuple[str, dict[str, Any], Manner]] = [
    ("h200", {}, Manner.FULL),
    ("h200", {"lengths_kv": SLEN}, Manner.RAGGED),
    ("h200", {"lengths_q": SLEN}, Manner.RAGGED),
    ("h200", {"lengths_kv": SLEN, "gradient": True}, Manner.RAGGED),
    ("h200", {"lengths_kv": SLEN, "lengths": (1, 128)}, Manner.CACHE),
    ("h200", {"lengths_kv": SLEN, "lengths": (1, 128), "gradient": True}, Manner.RAGGED),
    ("h200", {"lengths_kv": SLEN, "lengths_q": SLEN, "lengths": (1, 128)}, Manner.RAGGED),
    ("h200", {"lengths_kv": SLEN, "sinks": HEADS, "lengths": (1, 128)}, Manner.CACHE),
    ("h200", {"lengths_kv": SLEN, "terms": ALIBI, "lengths": (1, 128)}, Manner.RAGGED),
    ("h200", {"lengths_kv": SLEN, "options": DROPOUT, "lengths": (1, 128)}, Manner.RAGGED),
    ("h200", {"sinks": HEADS, "lengths": (1, 128)}, Manner.FULL),
    ("h200", {"sinks": HEADS, "lengths": (1, 128), "gradient": True}, Manner.RAGGED),
    ("h200", {"sinks": HEADS}, Manner.FULL),
    ("a100-sxm-80gb", {"lengths_kv": SLEN}, Manner.CLEANED),
    ("a100-sxm-80gb", {"lengths_kv": SLEN, "lengths": (1, 128)}, Manner.CLEANED),
    ("b200", {"lengths_kv": SLEN}, Manner.CLEANED),
    ("b200", {}, Manner.FULL),
]


@pytest.mark.usefixtures("proposals")
@pytest.mark.parametrize(("profile", "call", "manner"), MANNERS)
def test_manners(profile: str, call: dict[str, Any], manner: Manner) -> None:
    found = route(profile, **call)
    assert (found.manner, found.reasons) == (manner, ())
    assert found.forward is not None and found.forward.plan is not None
    assert (found.backward is not None) == call.get("gradient", False)
    plan = found.forward.plan.spec
    assert plan.ragged == (manner is Manner.RAGGED)
    assert plan.lengths == (manner is not Manner.FULL)
    assert found.spec is not None and not found.spec.ragged


@pytest.mark.usefixtures("proposals")
def test_sinks_with_gradients_are_told_by_what_cudnn_has(monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = torch.empty(H, device="meta", requires_grad=True)
    for version, manner in ((92400, Manner.CLEANED), (92600, Manner.RAGGED)):
        monkeypatch.setattr(dispatch, "library_version", lambda v=version: (v, []))
        found = route("h200", gradient=True, lengths_kv=SLEN, sinks=sinks)
        assert found.manner is manner
        assert found.spec is not None and found.spec.grad_sinks


CAUSAL_ALIBI = Terms(None, 0, alibi=True)
GPUS = ("h200", "a100-sxm-80gb", "b200")
SERVED: dict[str, dict[str, Any]] = {
    "window": {"terms": Terms(33, 20)},
    "causal window": {"terms": Terms(33, 0)},
    "bottom right": {"terms": BOTTOM, "lengths": (64, 128)},
    "alibi": {"terms": Terms(alibi=True)},
    "causal alibi": {"terms": Terms(None, 0, alibi=True)},
    "lengths": {"lengths_q": SLEN, "lengths_kv": SLEN},
    "causal lengths": {"lengths_q": SLEN, "lengths_kv": SLEN, "terms": Terms(None, 0)},
    "past the keys": {"terms": BOTTOM, "lengths": (256, 128)},
}


@pytest.mark.usefixtures("proposals")
@pytest.mark.parametrize("profile", GPUS)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_what_every_gpu_serves(name: str, gradient: bool, profile: str) -> None:
    found = route(profile, gradient=gradient, **SERVED[name])
    assert found.reasons == ()


@pytest.mark.usefixtures("proposals")
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("terms", [Terms(softcap=30.0), Terms(9, 0, softcap=30.0)])
def test_soft_caps_are_served_but_beside_lengths(
    terms: Terms, gradient: bool, profile: str
) -> None:
    found = route(profile, gradient=gradient, terms=terms)
    assert found.reasons == ()
    found = route(profile, gradient=gradient, terms=terms, lengths_kv=SLEN)
    assert [reason.rule for reason in found.reasons] == ["score_operations"]


@pytest.mark.usefixtures("proposals")
@pytest.mark.parametrize("profile", ["h200", "a100-sxm-80gb"])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_sinks_of_one_query(softcap: float, profile: str) -> None:
    """Kernels for one query know no sinks, so these come afterwards, unless gradients do too."""
    terms = Terms(softcap=softcap)
    found = route(profile, terms=terms, sinks=HEADS, lengths=(1, 128))
    assert found.reasons == () and found.sinks_after
    assert found.spec is not None and (found.spec.sinks, found.spec.lse) == (False, True)
    found = route(profile, terms=terms, sinks=HEADS, lengths=(1, 128), gradient=True)
    assert not found.sinks_after
    refused = softcap > 0 or profile != "h200"
    assert ("sinks_single_query" in {reason.rule for reason in found.reasons}) == refused


@pytest.mark.parametrize(
    ("given", "options", "rules"),
    [
        ({"lengths_kv": SLEN}, {"terms": Terms(alibi=True)}, ["score_operations"]),
        ({"lengths_kv": SLEN, "slopes": HEADS}, {"terms": CAUSAL_ALIBI}, ["score_operations"]),
        ({}, {"terms": Terms(3, 3), "dims": (264, 264), "gradient": True}, ["head_dim"]),
        ({}, {"options": Options(dropout_p=1.0), "terms": Terms(3, 3)}, ["dropout"]),
    ],
)
def test_static_reasons(given: dict[str, Any], options: dict[str, Any], rules: list[str]) -> None:
    found = route("h200", **options, **given)
    assert found.forward is None
    assert [reason.rule for reason in found.reasons] == rules


def test_cudnn_s_own_refusal_is_a_reason() -> None:
    found = route("h200", Options(dropout_p=0.25), BOTTOM, lengths=(64, 80))
    assert [reason.rule for reason in found.reasons] == ["cudnn"]
    assert "ottom right causal mask" in found.reasons[0].message


def test_calls_of_no_gpu() -> None:
    tensors = [t.detach().to("meta") for t in qkv(dtype=torch.float16)]
    found = padded.describe(Given(*tensors), Options(), Terms(1, 1), False)
    assert [reason.rule for reason in found.reasons] == ["device"]
    h200 = devices.described("h200")
    found = padded.describe(
        Given(*(t.float() for t in tensors)), Options(), Terms(1, 1), False, h200
    )
    assert [reason.rule for reason in found.reasons] == ["dtype"]
    empty = Given(tensors[0][:, :, :0], *tensors[1:])
    found = padded.describe(empty, Options(), Terms(1, 1), False, h200)
    assert [reason.rule for reason in found.reasons] == ["empty"]


def test_terms_that_make_no_difference_make_no_plans() -> None:
    found = route("h200", terms=Terms(500, 500, True))
    assert found.terms == Terms()
    single = route("h200", terms=BOTTOM, lengths=(1, 128), lengths_kv=SLEN)
    assert single.terms == Terms()
    assert single.spec is not None and not single.spec.causal


@pytest.mark.usefixtures("proposals")
def test_padding_to_any_length_of_a_bucket_has_one_plan() -> None:
    specs = set()
    for length in (129, 200, 256):
        found = route("h200", lengths=(length, length), lengths_kv=SLEN)
        assert found.forward is not None and found.forward.plan is not None
        specs.add(found.forward.plan.spec)
    assert len(specs) == 1


# ------------------------------------------------------------------------- what plans are told


def told(manner: Manner, **given: Any) -> Any:
    route = Route(Options(), Terms(), Outline(4, 64, 0.125), manner=manner)
    route.spec = attention(batch=3, lengths=(3, 4))
    route.operands = {Uid.SEQ_LEN_Q: lens(3, 3, 3), Uid.SEQ_LEN_KV: lens(4, 4, 4)}
    return padded._lengths(route, Given(*qkv(), **given))


def test_lengths_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.without_streams(monkeypatch)
    lengths = {"lengths_q": lens(9, -1, 2).long(), "lengths_kv": lens(0, 3, 5)}
    for manner in (Manner.RAGGED, Manner.CACHE):
        operands, *hidden = told(manner, **lengths)
        assert operands[Uid.SEQ_LEN_Q].tolist() == [3, 0, 2]
        assert operands[Uid.SEQ_LEN_KV].tolist() == [0, 3, 4]
        assert {t.dtype for t in operands.values()} == {torch.int32}
        assert hidden == [None, None]
    # A sequence of length 0 is told as one of length 1, and all of it is hidden.
    operands, hidden_q, hidden_kv = told(Manner.CLEANED, **lengths)
    assert operands[Uid.SEQ_LEN_Q].tolist() == [1, 1, 2]
    assert operands[Uid.SEQ_LEN_KV].tolist() == [1, 1, 4]
    assert hidden_q[:, 0, :, 0].tolist() == [[True] * 3, [True] * 3, [False, False, True]]
    assert hidden_kv[:, 0, :, 0].tolist() == [[True] * 4, [True] * 4, [False] * 4]
    operands, hidden_q, hidden_kv = told(Manner.CLEANED, lengths_kv=lens(1, 2, 3))
    assert operands[Uid.SEQ_LEN_Q].tolist() == [3, 3, 3]
    assert not hidden_q.any()
    operands, *hidden = told(Manner.RAGGED)
    assert operands[Uid.SEQ_LEN_KV].tolist() == [4, 4, 4]
    assert hidden == [None, None]


# ----------------------------------------------------------------------------------- interpreted


@pytest.fixture(params=["h200", "a100-sxm-80gb"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> interpreter.Machine:
    return interpreter.install(monkeypatch, padded, profile=request.param)


def assert_served(
    machine: interpreter.Machine,
    leaves: list[Tensor],
    options: dict[str, Any],
    mask: Tensor | None = None,
) -> None:
    options = options | {"fallback": False}
    ordinary = not (options.keys() - {"is_causal", "enable_gqa", "fallback"}) and len(leaves) == 3
    if ordinary:
        options = options | {"window": (3, 3)}
    for gradients in (True, False):
        assert_right(leaves, options, mask, gradients=gradients, tolerance=6e-3)
    assert machine.runs


@pytest.mark.parametrize("lengths", ["full", "both", "empty", "beyond"])
@pytest.mark.parametrize("scores", ["plain", "softcap"])
@pytest.mark.parametrize("band", ["none", "causal", "bottom right window", "bottom right both"])
def test_plans_are_told_what_makes_them_right(
    machine: interpreter.Machine, band: str, scores: str, lengths: str
) -> None:
    options = BAND[band] | SCORES[scores] | LENGTHS[lengths]
    if scores == "softcap" and lengths != "full":
        with pytest.raises(CudnnSdpaUnsupportedError, match="score_operations"):
            cudnn_sdpa(*qkv(dtype=torch.float16), fallback=False, **options)
        return
    assert_served(machine, qkv(dtype=torch.float16, order=BSHD), options)
    sinks = torch.randn(4).requires_grad_()
    grouped = qkv(heads=(4, 2, 1), dtype=torch.float16)
    assert_served(machine, [*grouped, sinks], options | GQA)


@pytest.mark.parametrize("scores", ["alibi", "softcap and alibi"])
@pytest.mark.parametrize("band", ["none", "causal", "causal window", "bottom right both"])
def test_plans_with_alibi(machine: interpreter.Machine, band: str, scores: str) -> None:
    options = BAND[band] | SCORES[scores]
    assert_served(machine, qkv(dtype=torch.float16), options)
    slopes = torch.rand(H, dtype=torch.float64)
    assert_served(machine, qkv(dtype=torch.float16), options | {"alibi_slopes": slopes})
    if options.get("is_causal") and scores == "alibi" and "causal_alignment" not in options:
        for name in ("keys", "both"):
            assert_served(machine, qkv(dtype=torch.float16), options | LENGTHS[name])


@pytest.mark.parametrize("lengths", ["full", "keys", "empty"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("band", ["none", "bottom right window"])
def test_plans_for_one_query(
    machine: interpreter.Machine, band: str, sinks: bool, lengths: str
) -> None:
    leaves = qkv((1, SKV), dtype=torch.float16)
    options = BAND[band] | LENGTHS[lengths]
    if not sinks:
        assert_served(machine, leaves, options)
        return
    leaves.append(torch.randn(4).requires_grad_())
    assert_right(leaves, options | {"fallback": False}, gradients=False, tolerance=6e-3)
    assert machine.runs and not any(spec.sinks for spec in machine.runs)
    if machine.device.sm == 90 and lengths == "full":  # ragged graphs are made for more queries
        assert_served(machine, leaves, options)
        return
    with pytest.raises(CudnnSdpaUnsupportedError, match="sinks_single_query"):
        assert_served(machine, leaves, options)


def test_capped_plans_for_one_query(machine: interpreter.Machine) -> None:
    assert_served(machine, qkv((1, SKV), dtype=torch.float16), SCORES["softcap"])


@pytest.mark.parametrize("lengths", ["full", "both", "empty"])
def test_plans_with_masks(machine: interpreter.Machine, lengths: str) -> None:
    bias = torch.randn(1, H, SQ, SKV)
    bias[:, :, 2] = -math.inf
    assert_served(machine, qkv(dtype=torch.float16), {"window": (3, 3)} | LENGTHS[lengths], bias)


def test_a_low_mask_row_beside_a_sink_keeps_its_level(machine: interpreter.Machine) -> None:
    """All weight goes to the sink where every key's score is far below it."""
    for queries in (SQ, 1):
        leaves = [*qkv((queries, SKV), dtype=torch.float16), torch.zeros(H).requires_grad_()]
        bias = torch.zeros(1, 1, queries, SKV)
        bias[:, :, -1] = -2e4
        assert_right(leaves, {"fallback": False}, bias, gradients=False, tolerance=6e-3)


def test_plans_of_one_sequence_without_a_batch(machine: interpreter.Machine) -> None:
    leaves = qkv(lead=(), dtype=torch.float16)
    got, lse = cudnn_sdpa(*leaves, return_lse=True, seq_lens_kv=lens(4), fallback=False)
    want, sums = from_definition([t[None] for t in leaves], {"seq_lens_kv": lens(4)})
    torch.testing.assert_close(got, want[0], rtol=6e-3, atol=6e-3)
    torch.testing.assert_close(lse, sums[0], rtol=6e-3, atol=6e-3)


def test_head_dimensions_are_padded_and_cut(machine: interpreter.Machine) -> None:
    assert_served(machine, qkv(dims=(12, 20), dtype=torch.float16), LENGTHS["both"])


def test_plans_whose_query_head_is_broadcast(machine: interpreter.Machine) -> None:
    query, key, value = qkv(dtype=torch.float16)
    sinks = torch.randn(H)
    got = cudnn_sdpa(query[:, :1], key, value, sinks=sinks, fallback=False)
    want, _ = from_definition([query[:, :1].expand(-1, H, -1, -1), key, value, sinks], {})
    torch.testing.assert_close(got, want, rtol=6e-3, atol=6e-3)


def test_plans_beside_sinks_that_want_no_gradient(machine: interpreter.Machine) -> None:
    leaves, sinks = qkv(dtype=torch.float16), torch.randn(H)
    got: Any = cudnn_sdpa(*leaves, sinks=sinks, fallback=False)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want, _ = from_definition([*exact, sinks.double()], {})
    for one, other in zip(
        torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), exact), strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-2, atol=1e-2)


def test_a_signature_is_decided_once(machine: interpreter.Machine) -> None:
    leaves = [t.detach() for t in qkv(dtype=torch.float16)]
    for lengths in itertools.permutations((1, 4, 7)):
        cudnn_sdpa(*leaves, seq_lens_kv=lens(*lengths), fallback=False)
    assert (len(machine.specs), len(machine.runs)) == (1, 6)
    cudnn_sdpa(*leaves, window=(1, 1), fallback=False)
    cudnn_sdpa(*leaves, window=(1, 2), fallback=False)
    assert len(machine.specs) == 3
    assert make_terms(False, "top_left", (1, 1), None, False) != Terms(1, 2)


def test_what_plans_are_told_is_not_written_during_a_capture(
    machine: interpreter.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once the capture is over the call is decided anew."""
    leaves = qkv(dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CudnnSdpaUnsupportedError, match="run the call once before the capture"):
        cudnn_sdpa(*leaves, seq_lens_kv=lens(7, 3, 1), fallback=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert_served(machine, leaves, {"seq_lens_kv": lens(7, 3, 1)})


def test_such_calls_load_no_compiler() -> None:
    code = """
import sys, torch
from cudnn_mha import cudnn_sdpa, cudnn_sdpa_varlen
q, x, cu = torch.randn(1, 2, 4, 8), torch.randn(4, 2, 8), torch.tensor([0, 4])
cudnn_sdpa(q, q, q, window=(1, 1))
cudnn_sdpa_varlen(x, x, x, cu, cu, 4, 4)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
