"""Keys and values in pages on a machine without a GPU: the fallback, and interpreted plans."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import (
    CudnnSdpaUnsupportedError,
    checks,
    cudnn_sdpa_paged,
    devices,
    paged,
    reference,
    sequences,
)
from cudnn_mha.inputs import Options
from cudnn_mha.routes import Given, Manner, Route
from cudnn_mha.terms import Terms
from tests import interpreter
from tests.support import refusal
from tests.test_extended import BAND, lens

B, H, PAGE, COLUMNS, POOL, D = 3, 4, 3, 4, 9, 8
LENGTHS = (10, 0, 4)
TABLE = torch.tensor([[5, 1, 7, 2], [0, 0, 0, 0], [8, 3, 99, -4]], dtype=torch.int32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tensors(
    queries: int, heads: tuple[int, int, int] = (H, 2, 1), dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    query = torch.randn(B, heads[0], queries, D).to(dtype)
    key, value = (
        torch.randn(POOL, own, PAGE, dim).to(dtype)
        for own, dim in zip(heads[1:], (D, 2 * D), strict=True)
    )
    return [query, key, value]


def by_sequence(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by a loop over the sequences and their keys, in float64."""
    o = {"causal_alignment": "bottom_right"} | options
    slopes = reference.alibi_slopes(query.shape[1]) if o.pop("alibi", False) else None
    slopes = o.pop("alibi_slopes", slopes)
    lengths_q = o.pop("seq_lens_q", lens(*[query.shape[2]] * B)).tolist()
    bottom_right = o.pop("causal_alignment") == "bottom_right"
    window = o.pop("window", (-1, -1))
    if o.get("is_causal"):
        window = (window[0], -1)
    output = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float64)
    for b, (rows, columns) in enumerate(zip(lengths_q, LENGTHS, strict=True)):
        places = [(int(TABLE[b, j // PAGE]), j % PAGE) for j in range(columns)]
        keys, values = (
            torch.stack([t[page, :, slot] for page, slot in places], 1)
            if places
            else t.new_zeros(t.shape[1], 0, t.shape[3])
            for t in (key, value)
        )
        output[b, :, :rows], lse[b, :, :rows] = reference.attention(
            query[b, :, :rows].double(),
            keys.double(),
            values.double(),
            alibi_slopes=slopes,
            bottom_right=bottom_right,
            window=window,
            **o,
        )
    return output, lse


def assert_right(
    given: list[Tensor], options: dict[str, Any], tolerance: float = 1e-6, **more: Any
) -> None:
    want, sums = by_sequence(*given, options)
    lengths = lens(*LENGTHS)
    got: Any = cudnn_sdpa_paged(*given, TABLE, lengths, return_lse=True, **options, **more)
    assert (got[0].dtype, got[1].dtype) == (given[0].dtype, torch.float32)
    for one, other in zip(got, (want, sums), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    pages = [t.transpose(1, 2).contiguous() for t in given[1:]]
    same: Any = cudnn_sdpa_paged(
        given[0], *pages, TABLE.long(), lengths.long(), page_layout="NHD", **options, **more
    )
    torch.testing.assert_close(same, got[0])


SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": torch.randn(H)},
    "lengths": {"seq_lens_q": lens(2, 1, 0)},
}


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("band", BAND)
def test_fallback(band: str, scores: str, queries: int) -> None:
    options = BAND[band] | SCORES[scores]
    if "seq_lens_q" in options:
        options["seq_lens_q"] = options["seq_lens_q"].clamp(max=queries)
    assert_right(tensors(queries), options)


def test_fallback_with_scale_and_slopes() -> None:
    assert_right(tensors(4, (H, H, H)), {"scale": -0.4, "alibi_slopes": torch.rand(H)})


def test_lengths_are_clamped_where_they_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "on_host", lambda *_: False)
    given = tensors(5)
    options: dict[str, Any] = {"is_causal": True}
    want = cudnn_sdpa_paged(*given, TABLE, lens(12, 0, 12), seq_lens_q=lens(5, 0, 1), **options)
    more = {"seq_lens_q": lens(50, -1, 1)}
    got = cudnn_sdpa_paged(*given, TABLE, lens(100, -3, 13), **more, **options)
    assert isinstance(got, Tensor)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"seq_lens_kv": lens(13, 0, 4)},
            "seq_lens_kv must be from 0 to 12, .* sequence 0, got 13",
        ),
        ({"seq_lens_kv": lens(12, -1, 4)}, "seq_lens_kv must be from 0 .* for sequence 1, got -1"),
        ({"seq_lens_q": lens(5, 6, 1)}, "seq_lens_q must be from 0 to 5, .* sequence 1, got 6"),
        (
            {"seq_lens_kv": lens(12, 0, 7)},
            "block_table must hold pages from 0 to 8 .*, got 99 for page 2 of sequence 2",
        ),
        (
            {"block_table": torch.tensor([[-1, 0, 0, 0]] * 3)},
            "block_table must hold pages from 0 to 8 .*, got -1 for page 0 of sequence 0",
        ),
    ],
)
def test_what_is_out_of_bounds_is_named(changed: dict[str, Any], message: str) -> None:
    given = {"block_table": TABLE, "seq_lens_kv": lens(*LENGTHS)} | changed
    with pytest.raises(ValueError, match=f"^{message}"):
        cudnn_sdpa_paged(*tensors(5), **given)


def test_the_last_query_belongs_to_the_last_key_unless_said_otherwise() -> None:
    given = tensors(5)
    got, other = (
        cudnn_sdpa_paged(*given, TABLE, lens(*LENGTHS), is_causal=True, **kind)
        for kind in ({}, {"causal_alignment": "bottom_right"})
    )
    top = cudnn_sdpa_paged(
        *given, TABLE, lens(*LENGTHS), is_causal=True, causal_alignment="top_left"
    )
    assert torch.equal(got, other)
    assert not torch.equal(got, top)


def test_gradients_are_refused() -> None:
    query, key, value = tensors(1)
    with pytest.raises(RuntimeError, match="attention to pages has no gradient"):
        cudnn_sdpa_paged(query.requires_grad_(), key, value, TABLE, lens(*LENGTHS))
    with torch.no_grad():
        got: Any = cudnn_sdpa_paged(query, key, value, TABLE, lens(*LENGTHS))
    assert got.shape == (B, H, 1, 2 * D)


def test_nothing_to_compute() -> None:
    query, key, value = tensors(2)
    got: Any = cudnn_sdpa_paged(query, key, value, TABLE[:, :0], lens(0, 0, 0), return_lse=True)
    assert not got[0].any()
    assert (got[1] == -math.inf).all()
    query = query[:, :, :0]
    empty: Any = cudnn_sdpa_paged(query, key, value, TABLE, lens(*LENGTHS), fallback=False)
    assert empty.shape == (B, H, 0, 2 * D)


def test_without_a_fallback_every_reason_is_raised() -> None:
    with pytest.raises(CudnnSdpaUnsupportedError, match="must be on a CUDA device, got cpu"):
        cudnn_sdpa_paged(*tensors(1), TABLE, lens(*LENGTHS), fallback=False)


Q, K = torch.randn(B, H, 2, D), torch.randn(POOL, 2, PAGE, D)
CALL: dict[str, Any] = {
    "query": Q,
    "key_pages": K,
    "value_pages": K,
    "block_table": TABLE,
    "seq_lens_kv": lens(*LENGTHS),
}
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"page_layout": "NDH"}, ValueError, "page_layout must be one of HND, NHD, got 'NDH'"),
    ({"query": Q[0]}, ValueError, "query must have 4 dimensions, got"),
    ({"key_pages": K[0]}, ValueError, "key_pages must have 4 dimensions, got"),
    ({"value_pages": K.half()}, TypeError, "query, key_pages and value_pages must have the same"),
    ({"key_pages": K.to("meta")}, RuntimeError, "key_pages must be on the device of query, cpu"),
    ({"page_layout": "NHD"}, ValueError, "the heads of key_pages must divide .* page_layout says"),
    ({"key_pages": K[..., :4]}, ValueError, "query and key_pages must have the same head dimen"),
    ({"value_pages": K[1:]}, ValueError, "key_pages and value_pages must be as many .* 9 of 3 an"),
    ({"value_pages": K[:, :, 1:]}, ValueError, "key_pages and value_pages must be .* 9 of 2"),
    ({"key_pages": K[:0], "value_pages": K[:0]}, ValueError, "key_pages must hold at least one"),
    ({"block_table": None}, TypeError, "block_table must be a torch.Tensor, got NoneType"),
    ({"block_table": TABLE[1:]}, ValueError, r"block_table must be of shape \(B, M\) with B = 3"),
    ({"block_table": TABLE.float()}, TypeError, "block_table must be int32 or int64"),
    ({"seq_lens_kv": [1]}, TypeError, "seq_lens_kv must be a torch.Tensor, got list"),
    ({"seq_lens_kv": lens(1)}, ValueError, r"seq_lens_kv must be of shape \(3,\), got \(1,\)"),
    ({"seq_lens_q": lens(1)}, ValueError, r"seq_lens_q must be of shape \(3,\), got \(1,\)"),
    ({"sinks": torch.ones(3)}, ValueError, r"sinks must be of shape \(4,\), got \(3,\)"),
    ({"alibi_slopes": lens(1, 1, 1, 1)}, TypeError, "alibi_slopes must be of a floating-point"),
    ({"window": (1, -2)}, ValueError, "window must hold -1"),
    ({"causal_alignment": "left"}, ValueError, "causal_alignment must be one of"),
    ({"scale": math.inf}, ValueError, "scale must be finite in float32, got inf"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_what_means_nothing_is_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        cudnn_sdpa_paged(**(CALL | changes))


# --------------------------------------------------------------------------------- interpreted


@pytest.fixture
def any_page_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes pages of any size."""
    rules = tuple(rule for rule in checks._RULES if rule is not checks._pages)
    monkeypatch.setattr(checks, "_RULES", rules)


@pytest.mark.usefixtures("any_page_size")
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("scores", [name for name in SCORES if name not in ("alibi", "softcap")])
@pytest.mark.parametrize("band", ["none", "causal", "bottom right window", "bottom right both"])
def test_plans_are_told_what_makes_them_right(
    monkeypatch: pytest.MonkeyPatch, band: str, scores: str, queries: int
) -> None:
    machine = interpreter.install(monkeypatch, paged)
    options = BAND[band] | SCORES[scores]
    if "seq_lens_q" in options:
        options["seq_lens_q"] = options["seq_lens_q"].clamp(max=queries)
    given = tensors(queries, dtype=torch.float16)
    assert_right(given, options, 6e-3, fallback=False)
    assert any(spec.sinks for spec in machine.specs) == (scores == "sinks" and queries > 1)
    assert len(machine.runs) == 2
    assert all(spec.page_table is not None and spec.lengths for spec in machine.specs)


@pytest.mark.usefixtures("any_page_size")
def test_a_negative_scale_moves_into_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.install(monkeypatch, paged)
    assert_right(tensors(4, dtype=torch.float16), {"scale": -0.5}, 6e-3, fallback=False)


# -------------------------------------------------------------------------------------- routes


def route(profile: str, queries: int, terms: Terms, **given: Any) -> Route:
    """As described for a GPU, with cuDNN's own refusal among the reasons."""
    query = torch.empty(B, 8, queries, 64, dtype=torch.float16, device="meta")
    pool = torch.empty(40, 2, 16, 64, dtype=torch.float16, device="meta")
    table = torch.empty(B, 20, dtype=torch.int32, device="meta")
    lengths = torch.empty(B, dtype=torch.int32, device="meta")
    call = Given(query, pool, pool, lengths_kv=lengths, **given)
    device = devices.described(profile)
    found = paged.describe(call, table, Options(), terms, device)
    words = None if found.reasons else refusal(found.graphs[0], device)
    if words is not None:
        found.reasons = (checks.Reason("cudnn", words),)
    return found


GPUS = ("h200", "a100-sxm-80gb", "b200")


@pytest.mark.parametrize("queries", [4, 200])
@pytest.mark.parametrize("profile", GPUS)
def test_cudnn_plans_pages(profile: str, queries: int) -> None:
    for terms in (Terms(), Terms(None, 0, True), Terms(40, 0, True)):
        found = route(profile, queries, terms)
        assert (found.reasons, found.manner) == ((), Manner.CACHE)
        assert found.spec is not None
        assert found.spec.seq_kv == 320
        assert found.spec.page_table is not None
        assert found.spec.page_table.shape == (B, 1, 20, 1)


def test_the_one_query_sees_all_keys() -> None:
    for profile, left in itertools.product(("h200", "a100-sxm-80gb"), (None, 40)):
        found = route(profile, 1, Terms(left, 0, True))
        assert found.spec is not None and not found.spec.causal
        assert found.terms == (Terms() if left is None else Terms(40, None, True))
        assert found.reasons == ()


def test_static_reasons() -> None:
    found = route("h200", 4, Terms(alibi=True))
    assert [reason.rule for reason in found.reasons] == ["score_operations"]
