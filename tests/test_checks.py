"""The support matrix, held against cuDNN's own answers for every described GPU.

The property tests draw 1,000 specs and 300 calls, always the same ones. With
``CUDNN_MHA_EXAMPLES=20000`` they draw that many, new ones on every run; pytest's
``--hypothesis-seed`` then says which.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cudnn_mha import checks, devices, dispatch, runtime
from cudnn_mha.cache import Slot
from cudnn_mha.checks import HAZARDS, Kind, Reason
from cudnn_mha.devices import Device
from cudnn_mha.dispatch import Decision, decide
from cudnn_mha.inputs import Options, validate
from cudnn_mha.spec import (
    AttentionSpec,
    TensorSpec,
    canonical_stride,
    contiguous_stride,
    default_scale,
    dense_stride,
    layout_like,
)
from tests.support import BACKWARD, FORWARD, PROFILES, attention, refusal, tensor

EXAMPLES = os.environ.get("CUDNN_MHA_EXAMPLES")

HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 64, 128)
BATCHES = (1, 1, 2, 3, 8, 17, 64, 1000, 65535)
LENGTHS = (
    *(1, 1, 2, 3, 7, 16, 31, 63, 64, 65, 96, 127, 128, 129, 192, 200, 255, 256, 257, 320, 384),
    *(777, 1000, 1024, 1088, 2048, 4096, 16384),
)
DIMS = (8, 16, 24, 32, 40, 64, 64, 72, 80, 96, 104, 128, 128, 136, 160, 192, 256, 264, 320, 512)
ODD_DIMS = (4, 12, 20, 100, 250)
PAIRS = ((64, 128), (128, 64), (192, 128), (192, 128), (256, 256), (256, 256), (256, 128))


def examples(count: int) -> settings:
    """How many examples a property test draws, and which."""
    return settings(
        max_examples=int(EXAMPLES or count),
        derandomize=EXAMPLES is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def rarely(draw: st.DrawFn, one_in: int) -> bool:
    return draw(st.integers(1, one_in)) == one_in


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """Dimensions in any order in memory, perhaps with gaps, repeated, or not addressable."""
    order = draw(st.permutations((0, 1, 2)))
    gap = draw(st.sampled_from((0, 0, 0, 8, 64)))
    if rarely(draw, 40):
        gap = draw(st.sampled_from((1, 2, 4)))
    stride = list(dense_stride((*shape[:3], shape[3] + gap), (*order, 3)))
    if rarely(draw, 10):
        stride[draw(st.integers(0, 2))] = 0
    if rarely(draw, 40):
        stride = [2 * n for n in stride]
    return TensorSpec(shape, canonical_stride(shape, stride), dtype)


@st.composite
def biases(draw: st.DrawFn, scores: tuple[int, int, int, int], dtype: str) -> TensorSpec:
    """The form that the edge gives every mask: Sq repeated by stride 0, Skv written out."""
    stored = tuple(draw(st.sampled_from((1, n))) for n in scores[:3])
    stride = [*contiguous_stride((*stored, scores[3]))]
    if stored[2] == 1:
        stride[2] = 0
    shape = (*stored[:2], *scores[2:])
    kind = draw(st.sampled_from((dtype, "float32", "float16", "bfloat16")))
    return TensorSpec(shape, canonical_stride(shape, stride), kind)


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Any spec that the edge can make, and a few that it never would."""

    def pick(values: Any) -> Any:
        return draw(st.sampled_from(values))

    direction, dtype = pick((FORWARD, BACKWARD)), pick(("float16", "bfloat16"))
    batch, heads_q = pick(BATCHES), pick(HEADS)
    groups = [n for n in range(1, heads_q + 1) if heads_q % n == 0]
    if rarely(draw, 40):
        groups = [3, 5, 7]
    heads_k = pick(groups)
    heads_v = heads_k if draw(st.booleans()) else pick(groups)
    lengths = st.sampled_from(LENGTHS) | st.integers(1, 5000)
    seq_q = draw(lengths)
    seq_kv = seq_q if draw(st.booleans()) else draw(lengths)
    dim_qk, dim_v = pick(((pick(DIMS),) * 2, (pick(DIMS), pick(DIMS)), pick(PAIRS)))
    if rarely(draw, 30):
        dim_v = pick(ODD_DIMS)
    query = draw(layouts((batch, heads_q, seq_q, dim_qk), dtype))
    key = draw(layouts((batch, heads_k, seq_kv, dim_qk), dtype))
    value = draw(layouts((batch, heads_v, seq_kv, dim_v), dtype))
    output = layout_like((batch, heads_q, seq_q, dim_v), query)
    fields: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "dropout_p": pick((0.0, 0.0, 0.0, 0.1, 0.5, 0.125, 0.9375)),
        "padding": draw(st.booleans()),
    }
    if draw(st.booleans()):
        fields["bias"] = draw(biases((batch, heads_q, seq_q, seq_kv), dtype))
    if direction is FORWARD:
        fields["lse"] = draw(st.booleans())
    else:
        fields["deterministic"] = draw(st.booleans())
        fields["grad_output"] = pick((output, draw(layouts(output.shape, dtype))))
        for name, of in (("query", query), ("key", key), ("value", value)):
            fields[f"grad_{name}"] = layout_like(of.shape, of)
        if "bias" in fields and draw(st.booleans()):
            fields["grad_bias"] = tensor(fields["bias"].shape, dtype)
    scale = pick((default_scale(dim_qk), 1.0, 0.0))
    return AttentionSpec(direction, query, key, value, output, scale=scale, **fields)


def disagreements(spec: AttentionSpec, device: Device) -> list[str]:
    """Where the static rules and cuDNN contradict each other about ``spec``."""
    spec = checks.remedied(spec, device)
    reasons = checks.check(spec, device, runtime.cudnn_version())
    answer = refusal(spec, device)
    found = [f"a reason says nothing: {reason!r}" for reason in reasons if not said(reason)]
    if answer is not None and not reasons:
        found.append(f"no rule knows that cuDNN refuses {spec} on {device}: {answer}")
    strict = [reason for reason in reasons if reason.kind is Kind.UNSUPPORTED]
    if answer is None and strict:
        found.append(f"cuDNN plans {spec} on {device}, but {'; '.join(map(str, strict))}")
    return found


def said(reason: Reason) -> bool:
    return bool(reason.rule and reason.rule.isidentifier() and len(reason.message) > 20)


@examples(1000)
@given(spec=specs(), profile=st.sampled_from(PROFILES))
def test_rules_agree_with_cudnn(spec: AttentionSpec, profile: str) -> None:
    """cuDNN plans whatever the rules let through, and refuses whatever they call unsupported."""
    assert not disagreements(spec, devices.described(profile))


def described(sm: int) -> Device:
    """A device of any compute capability; the rules read nothing else of it."""
    return dataclasses.replace(devices.described("h200"), name=f"GPU {sm}", sm=sm)


def rules(spec: AttentionSpec, sm: int = 90, version: int = 92400) -> list[str]:
    return [reason.rule for reason in checks.check(spec, described(sm), version)]


def strided(*stride: int, shape: Sequence[int] = (2, 4, 128, 64)) -> TensorSpec:
    return TensorSpec(tuple(shape), stride, "float16")


SCORES = (2, 4, 128, 128)
WIDE = strided(4 * 128 * 128, 128 * 128, 128, 2)
ODD = strided(4 * 128 * 24, 128 * 24, 24, 1, shape=(2, 4, 128, 20))
GAPPED = strided(4 * 128 * 68, 128 * 68, 68, 1)

REASONS: list[tuple[str, Kind, int, AttentionSpec, list[str]]] = [
    ("capability", Kind.UNSUPPORTED, 75, attention(), ["GPU 75", "7.5", "8.0"]),
    ("dtype", Kind.UNSUPPORTED, 90, attention(dtype="float32"), ["got float32", "bfloat16"]),
    (
        "dtype",
        Kind.UNSUPPORTED,
        90,
        attention(key=tensor((2, 4, 128, 64), "bfloat16")),
        ["query float16", "key bfloat16", "value float16"],
    ),
    ("bias_dtype", Kind.UNSUPPORTED, 90, attention(bias=tensor(SCORES, "float64")), ["float64"]),
    ("last_stride", Kind.UNSUPPORTED, 90, attention(key=WIDE), ["key", "(65536, 16384, 128, 2)"]),
    (
        "last_stride",
        Kind.UNSUPPORTED,
        90,
        attention(bias=strided(4 * 128 * 256, 128 * 256, 256, 2, shape=SCORES)),
        ["bias", "stride 1"],
    ),
    ("last_stride", Kind.UNSUPPORTED, 90, attention(BACKWARD, grad_output=WIDE), ["grad_output"]),
    ("row_stride", Kind.WRONG, 90, attention(value=GAPPED), ["value", "16 bytes", "68"]),
    ("row_stride", Kind.WRONG, 80, attention(BACKWARD, grad_key=GAPPED), ["grad_key"]),
    ("empty", Kind.WRONG, 90, attention(lengths=(8, 0)), ["0"]),
    ("empty", Kind.WRONG, 90, attention(batch=0), ["0"]),
    ("heads", Kind.UNSUPPORTED, 90, attention(heads=(4, 3, 4)), ["key", "3 and 4"]),
    ("heads", Kind.UNSUPPORTED, 90, attention(heads=(4, 4, 3)), ["value", "3 and 4"]),
    ("launch_grid", Kind.WRONG, 90, attention(batch=65536), ["batch", "65535", "65536"]),
    ("launch_grid", Kind.WRONG, 90, attention(heads=(65536, 1, 1)), ["heads", "65535", "65536"]),
    (
        "size",
        Kind.UNSUPPORTED,
        90,
        attention(batch=1, heads=(1, 1, 1), lengths=(2**31, 64)),
        ["the length of query", "below 2^31", "2147483648"],
    ),
    (
        "size",
        Kind.UNSUPPORTED,
        90,
        attention(batch=1, heads=(1, 1, 1), dims=(64, 2**31)),
        ["the head dimension of value", "2147483648"],
    ),
    ("single_token", Kind.UNSUPPORTED, 90, attention(BACKWARD, lengths=(1, 1)), ["Sq = Skv = 1"]),
    (
        "index_overflow",
        Kind.WRONG,
        90,
        attention(BACKWARD, batch=2048, heads=(128, 1, 1), lengths=(128, 8)),
        ["2147483648", "split"],
    ),
    (
        "head_dim",
        Kind.UNSUPPORTED,
        90,
        attention(dims=(20, 64), query=ODD, key=ODD),
        ["Dqk = 20, Dv = 64"],
    ),
    ("head_dim", Kind.UNSUPPORTED, 80, attention(BACKWARD, dims=(64, 136)), ["128", "sm_80"]),
    ("head_dim", Kind.UNSUPPORTED, 90, attention(BACKWARD, dims=(264, 64)), ["256", "sm_90"]),
    ("head_dim", Kind.UNSUPPORTED, 100, attention(BACKWARD, dims=(192, 64)), ["(192, 128)"]),
    ("dropout", Kind.UNSUPPORTED, 90, attention(dropout_p=1.0), ["[0, 1)", "1.0"]),
    ("dropout", Kind.WRONG, 80, attention(dropout_p=0.1), ["1/16", "sm_80", "0.1"]),
    (
        "single_key",
        Kind.UNSUPPORTED,
        120,
        attention(BACKWARD, lengths=(64, 1), bias=tensor((2, 4, 64, 1))),
        ["Skv = 1", "sm_120"],
    ),
    (
        "exclusive",
        Kind.UNSUPPORTED,
        103,
        attention(BACKWARD, dropout_p=0.5, deterministic=True),
        ["sm_103", "dropout and deterministic"],
    ),
    (
        "exclusive",
        Kind.UNSUPPORTED,
        100,
        attention(BACKWARD, dims=(192, 128), bias=tensor(SCORES), grad_bias=tensor(SCORES)),
        ["requires a gradient", "Dqk = 192"],
    ),
    (
        "exclusive",
        Kind.UNSUPPORTED,
        100,
        attention(BACKWARD, dims=(256, 256), dropout_p=0.5),
        ["no dropout", "(256, 256)"],
    ),
    ("decode", Kind.WRONG, 100, attention(lengths=(1, 128)), ["length 1", "9.24.1"]),
    (
        "sinks_single_query",
        Kind.UNSUPPORTED,
        90,
        dataclasses.replace(attention(lengths=(1, 128)), sinks=True),
        ["one query where a gradient is wanted", "torch.no_grad()"],
    ),
    *(
        (
            "score_operations",
            Kind.WRONG,
            90,
            dataclasses.replace(attention(), lengths=True, **fields),
            ["beside lengths", "read those that are told otherwise wrong"],
        )
        for fields in ({"softcap": 5.0}, {"score_mod": ("neg", "score")}, {"slopes": True})
    ),
    (
        "page_size",
        Kind.UNSUPPORTED,
        90,
        dataclasses.replace(
            attention(lengths=(128, 48)),
            lengths=True,
            page_table=TensorSpec((2, 1, 4, 1), (4, 4, 1, 1), "int32"),
        ),
        ["powers of two", "got 48"],
    ),
]


@pytest.mark.parametrize(("rule", "kind", "sm", "spec", "words"), REASONS)
def test_each_rule_says_what_was_given_and_what_is_allowed(
    rule: str, kind: Kind, sm: int, spec: AttentionSpec, words: list[str]
) -> None:
    (reason, *others) = checks.check(spec, described(sm), 92400)
    assert (reason.rule, reason.kind) == (rule, kind)
    assert {other.rule for other in others} <= {rule}
    assert [word for word in words if word not in reason.message] == []
    assert str(reason) == f"{reason.message} [{rule}]"


def test_the_table_above_has_every_rule() -> None:
    """All but the ones that follow from a table entry's neighbour have an example."""
    assert len({rule for rule, *_ in REASONS}) == 19
    assert len(checks._RULES) == 12


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 103, 120])
def test_an_ordinary_call_has_no_reason(direction: Any, sm: int) -> None:
    assert rules(attention(direction, causal=True), sm) == []


def test_all_reasons_are_listed_not_the_first() -> None:
    wrong = strided(4 * 128 * 132, 128 * 132, 132, 2, shape=(2, 4, 128, 60))
    spec = attention(
        BACKWARD,
        heads=(4, 4, 3),
        dims=(60, 264),
        query=wrong,
        bias=tensor(SCORES, "float64"),
        dropout_p=0.3,
    )
    found = checks.check(spec, described(75), 92400)
    assert {reason.rule for reason in found} == {
        "bias_dtype",
        "capability",
        "dropout",
        "head_dim",
        "heads",
        "last_stride",
        "row_stride",
    }
    head_dims = [reason.message for reason in found if reason.rule == "head_dim"]
    assert len(head_dims) == 2  # no multiple of 8, and too large
    assert any("key" in r.message for r in found if r.rule == "row_stride")


def test_strides_of_single_rows_and_of_the_bias_rows_are_free() -> None:
    single = strided(64, 3, 5, 1, shape=(2, 1, 1, 64))
    assert rules(attention(heads=(1, 1, 1), lengths=(1, 128), query=single)) == []
    odd = strided(4 * 128 * 129, 128 * 129, 129, 1, shape=SCORES)
    assert rules(attention(bias=odd)) == []


@pytest.mark.parametrize(
    ("direction", "sm", "dims", "version", "served"),
    [
        (FORWARD, 80, (512, 512), 91900, True),
        (FORWARD, 120, (576, 512), 91900, True),
        (BACKWARD, 80, (128, 128), 91900, True),
        (BACKWARD, 89, (136, 128), 92800, False),
        (BACKWARD, 90, (256, 256), 91900, True),
        (BACKWARD, 90, (256, 264), 92800, False),
        (BACKWARD, 100, (128, 64), 91900, True),
        (BACKWARD, 100, (192, 128), 91900, True),
        (BACKWARD, 100, (128, 192), 92800, False),
        (BACKWARD, 100, (256, 256), 92299, False),
        (BACKWARD, 103, (256, 256), 92300, True),
        (BACKWARD, 100, (256, 128), 92800, False),
        (BACKWARD, 120, (192, 128), 92800, False),
    ],
)
def test_head_dims_by_architecture_and_version(
    direction: Any, sm: int, dims: tuple[int, int], version: int, served: bool
) -> None:
    found = rules(attention(direction, dims=dims), sm, version)
    assert found == ([] if served else ["head_dim"])


@pytest.mark.parametrize(
    ("sm", "seq_q", "version", "wrong"),
    [
        (100, 1, 91900, True),
        (103, 1, 92500, True),
        (110, 1, 92400, True),
        (100, 1, 92401, False),
        (100, 1, 92501, False),
        (100, 2, 92400, False),
        (90, 1, 92400, False),
        (120, 1, 92400, False),
    ],
)
def test_decode_window(sm: int, seq_q: int, version: int, wrong: bool) -> None:
    assert rules(attention(lengths=(seq_q, 128)), sm, version) == ["decode"] * wrong


@pytest.mark.parametrize(
    ("sm", "p", "wrong"),
    [(90, 0.1, False), (80, 0.1, True), (80, 0.125, False), (100, 0.0625, False), (120, 0.9, True)],
)
def test_dropout_is_exact_only_in_sixteenths_off_sm_90(sm: int, p: float, wrong: bool) -> None:
    assert rules(attention(dropout_p=p), sm) == ["dropout"] * wrong


def test_grid_and_index_limits_are_exact() -> None:
    assert rules(attention(batch=65535, lengths=(1, 8))) == []
    assert rules(attention(batch=65536, heads=(65536, 1, 1), lengths=(1, 8))) == ["launch_grid"] * 2
    below = attention(BACKWARD, batch=1, heads=(64, 1, 1), lengths=(2**19 - 1, 8), dims=(64, 8))
    assert rules(below) == []
    at = attention(BACKWARD, batch=1, heads=(64, 1, 1), lengths=(2**19, 8), dims=(64, 8))
    assert rules(at) == ["index_overflow"] * 2  # query and its gradient
    forward = attention(batch=1, heads=(64, 1, 1), lengths=(2**19, 8), dims=(64, 8))
    assert rules(forward) == []


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"lengths": (2**31 - 1, 64)}, 0),
        ({"lengths": (2**31, 64)}, 1),
        ({"lengths": (64, 2**31 - 1)}, 0),
        ({"lengths": (64, 2**31)}, 1),
        ({"dims": (2**31 - 8, 64)}, 0),
        ({"dims": (2**31, 2**33)}, 2),
    ],
)
def test_the_limit_of_a_size_is_that_of_cudnn(
    profile: str, fields: dict[str, Any], refused: int
) -> None:
    spec = attention(batch=1, heads=(1, 1, 1), **fields)
    device = devices.described(profile)
    assert rules(spec, device.sm) == ["size"] * refused
    assert disagreements(spec, device) == []


def test_exclusive_rules_hold_on_sm_10x_only() -> None:
    bias = {"bias": tensor(SCORES), "grad_bias": tensor(SCORES)}
    everything = attention(BACKWARD, dropout_p=0.5, deterministic=True, **bias)
    assert rules(everything, 100) == ["exclusive"] * 3
    assert rules(everything, 90) == rules(everything, 80) == rules(everything, 120) == []
    assert rules(attention(BACKWARD, deterministic=True, bias=tensor(SCORES)), 100) == []


def test_single_key_rule_needs_bias_and_backward() -> None:
    bias = tensor((2, 4, 64, 1))
    for sm, found in ((80, 1), (89, 1), (90, 0), (100, 0), (120, 1)):
        assert rules(attention(BACKWARD, lengths=(64, 1), bias=bias), sm) == ["single_key"] * found
    assert rules(attention(BACKWARD, lengths=(64, 1)), 80) == []
    assert rules(attention(lengths=(64, 1), bias=bias), 80) == []


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("lengths", [(128, 256), (127, 128), (128, 64), (1, 128), (129, 129)])
def test_backward_tail_remedy_applies_exactly_where_stated(
    sm: int, direction: Any, lengths: tuple[int, int]
) -> None:
    spec = attention(direction, lengths=lengths)
    wanted = direction is BACKWARD and sm == 90 and any(n % 128 for n in lengths)
    got = checks.remedied(spec, described(sm))
    assert got == (dataclasses.replace(spec, padding=True) if wanted else spec)
    assert checks.remedied(got, described(sm)) == got


def test_hazards_say_everything() -> None:
    names = [hazard.name for hazard in HAZARDS]
    assert len(set(names)) == len(names)
    for hazard in HAZARDS:
        texts = (hazard.name, hazard.condition, hazard.remedy, hazard.cost, hazard.source)
        assert all(texts)
        assert (hazard.applies is None) == (hazard.remedied is None)
    changing = [hazard.name for hazard in HAZARDS if hazard.applies]
    assert changing == ["backward_tail", "past_the_keys"]


@pytest.mark.parametrize("sm", [80, 90, 120])
def test_what_lies_past_the_keys_is_served_with_lengths_alone(sm: int) -> None:
    gpu = {80: "a100-sxm-80gb", 90: "h200", 120: "rtx-5090"}[sm]
    device = devices.described(gpu)
    for fields in ({"left": 8}, {"causal": True, "bottom_right": True}):
        longer = attention(lengths=(256, 128), **fields)
        assert refusal(longer, device) is not None
        told = checks.remedied(longer, device)
        assert told == dataclasses.replace(longer, padding=True)
        assert refusal(told, device) is None
        assert checks.remedied(told, device) == told
        for other in (
            attention(lengths=(128, 256), **fields),
            attention(lengths=(256, 128), softcap=2.0, **fields),
        ):
            assert checks.remedied(other, device) == other
    plain = attention(lengths=(256, 128), causal=True)
    assert checks.remedied(plain, device) == plain


class Layout(NamedTuple):
    """How a caller's tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def meta(self, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device="meta")


class UserCall(NamedTuple):
    """One call as a user may write it."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Options
    gradient: bool

    @property
    def lead(self) -> tuple[int, int]:
        shapes = [t.shape[:-2] for t in (self.query, self.key, self.value)]
        batch = 1 if self.query.dim() == 3 else max(s[0] for s in shapes)
        heads = max(s[-1] for s in shapes)
        return batch, heads


@st.composite
def memory(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Any order in memory, gaps, repeated dimensions."""
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.sampled_from((0, 0, 0, 8, 3)))
    stored = list(shape)
    stored[order[-1]] += gap
    stride = list(dense_stride(stored, order))
    if rarely(draw, 6):
        stride[draw(st.integers(0, len(shape) - 1))] = 0
    return Layout(shape, tuple(stride))


@st.composite
def calls(draw: st.DrawFn) -> UserCall:
    def pick(values: Any) -> Any:
        return draw(st.sampled_from(values))

    dtype = pick((torch.float16, torch.bfloat16))
    batch, heads = pick((1, 2, 3)), pick((1, 2, 4, 6))
    gqa = draw(st.booleans())
    groups = [n for n in (1, 2, 3, 4, 6) if heads % n == 0] if gqa else [1, heads]
    heads_of = [heads, pick(groups), pick(groups)]
    if not gqa and rarely(draw, 4):
        heads_of[0] = 1
    seq_q, seq_kv = pick((1, 5, 64, 130)), pick((1, 7, 64, 129))
    dim_qk, dim_v = pick((4, 8, 20, 64)), pick((3, 8, 64))
    shapes = [(seq_q, dim_qk), (seq_kv, dim_qk), (seq_kv, dim_v)]
    four = draw(st.booleans())
    tensors = []
    for own_heads, rest in zip(heads_of, shapes, strict=True):
        shape = (*([pick((1, batch))] if four else []), own_heads, *rest)
        tensors.append(draw(memory(shape)).meta(dtype))
    lead = [max(t.shape[0] for t in tensors)] if four else []
    lead.append(max(t.shape[-3] for t in tensors))
    mask = None
    if draw(st.booleans()):
        shape = tuple(pick((1, n)) for n in (*lead, seq_q, seq_kv))
        shape = shape[draw(st.integers(0, len(shape))) :]
        kind = pick((torch.bool, torch.float32, torch.float16, torch.bfloat16))
        mask = draw(memory(shape)).meta(kind) if shape else torch.empty((), dtype=kind).to("meta")
        if kind != torch.bool and draw(st.booleans()):
            mask = mask.requires_grad_()
    options = Options(
        dropout_p=pick((0.0, 0.5)),
        is_causal=mask is None and draw(st.booleans()),
        scale=pick((None, 0.5, -0.5, 0.0)),
        enable_gqa=gqa,
        return_lse=draw(st.booleans()),
    )
    return UserCall(*tensors, mask, options, draw(st.booleans()))


def without_plans(
    spec: AttentionSpec, device: Device, workspace_limit: int | None
) -> tuple[Slot, tuple[Reason, ...]]:
    plan: Any = SimpleNamespace(spec=spec)
    return Slot(plan), ()


def decided(call: UserCall, device: Device) -> Decision:
    tensors = (call.query, call.key, call.value, call.mask)
    validate(*tensors, call.options)
    with mock.patch.object(dispatch, "find_plan", without_plans):
        return decide(*tensors, call.options, gradient=call.gradient, device=device)


def wanted_specs(decision: Decision) -> Iterator[AttentionSpec]:
    assert decision.spec is not None
    yield decision.spec
    if decision.gradient:
        yield decision.backward_spec(decision.spec.output)


def misplaced(spec: AttentionSpec) -> list[str]:
    """What of a spec cuDNN could not address, or would be read wrongly."""
    found = []
    for name, layout in spec.tensors.items():
        if layout.stride[-1] != 1 or layout.stride != canonical_stride(layout.shape, layout.stride):
            found.append(f"{name} has strides {layout.stride}")
        if name in ("bias", "grad_bias"):
            continue
        if any(2 * stride % 16 for stride in layout.stride[:-1]) or layout.shape[-1] % 8:
            found.append(f"{name} is not in rows of 16 bytes: {layout}")
    if spec.bias is not None:
        scores = (spec.batch, spec.heads_q, spec.seq_q, spec.seq_kv)
        batch, heads = spec.bias.shape[:2]
        if batch not in (1, scores[0]) or heads not in (1, scores[1]):
            found.append(f"bias repeats wrongly: {spec.bias}")
        stored = (batch, heads, spec.seq_q, spec.seq_kv)
        repeated = spec.seq_q > 1 and spec.bias.stride[2] == 0
        stride = [*contiguous_stride((*stored[:2], 1 if repeated else spec.seq_q, spec.seq_kv))]
        stride[2] = 0 if repeated else stride[2]
        if spec.bias.shape != stored or spec.bias.stride != canonical_stride(stored, stride):
            found.append(f"bias is not in its one form: {spec.bias}")
    if spec.grad_bias is not None and not spec.grad_bias.is_contiguous:
        found.append(f"grad_bias has gaps: {spec.grad_bias}")
    return found


@examples(300)
@given(call=calls(), profile=st.sampled_from(PROFILES))
def test_any_call_becomes_a_spec_that_cudnn_can_address(call: UserCall, profile: str) -> None:
    decision = decided(call, devices.described(profile))
    batch, heads = call.lead
    query, key, value = call.query, call.key, call.value
    default = 1 / math.sqrt(query.shape[-1])
    scale = default if call.options.scale is None else abs(call.options.scale) or 1.0
    assert decision.outline == (query.dim(), value.shape[-1], scale)
    for spec in wanted_specs(decision):
        assert misplaced(spec) == []
        up = [t.shape[-1] + -t.shape[-1] % 8 for t in (query, value)]
        assert spec.query.shape == (batch, heads, query.shape[-2], up[0])
        assert spec.key.shape == (batch, key.shape[-3], key.shape[-2], up[0])
        assert spec.value.shape == (batch, value.shape[-3], key.shape[-2], up[1])
        assert spec.output.shape == (batch, heads, query.shape[-2], up[1])
        assert (spec.causal, spec.dropout_p) == (call.options.is_causal, call.options.dropout_p)
        assert spec.scale == scale
        assert (spec.bias is None) == (call.mask is None)
        assert spec.lse == (not spec.backward and (call.gradient or call.options.return_lse))
        wants = call.mask is not None and call.mask.requires_grad and spec.backward
        assert (spec.grad_bias is not None) == wants
    layout_rules = {"last_stride", "row_stride", "dtype", "bias_dtype", "heads", "empty"}
    assert layout_rules.isdisjoint(reason.rule for reason in decision.reasons)
    assert decision.served == (not decision.reasons)
    assert decision.as_is == readable_as_is(call)


def readable_as_is(call: UserCall) -> bool:
    """Whether cuDNN can be handed the caller's own tensors."""
    batch, heads = call.lead
    tensors = (call.query, call.key, call.value)
    scale = 1.0 if call.options.scale is None else call.options.scale
    if call.mask is not None or call.query.dim() == 3 or scale <= 0:
        return False
    if call.query.shape[1] != heads or any(t.shape[0] != batch for t in tensors):
        return False
    return all(
        t.shape[3] % 8 == 0
        and t.stride(3) == 1
        and all(t.stride(d) % 8 == 0 for d in range(3) if t.shape[d] > 1)
        for t in tensors
    )
