"""Packed sequences on a machine without a GPU: the fallback, and plans that are interpreted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import (
    CudnnSdpaUnsupportedError,
    config,
    cudnn_sdpa_varlen,
    devices,
    packed,
    padded,
    reference,
)
from cudnn_mha.graph_builder import Uid
from cudnn_mha.inputs import Options
from cudnn_mha.routes import Given, Route
from cudnn_mha.sequences import bucket_of_tokens
from cudnn_mha.terms import Terms
from tests import interpreter
from tests.support import refusal
from tests.test_extended import BAND, SCORES, lens

H, D = 4, 8
LENGTHS_Q = (3, 0, 5, 1)
LENGTHS_KV = (4, 2, 0, 7)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def starts(lengths: tuple[int, ...], gap: int = 0) -> Tensor:
    """Where slots with room for ``gap`` more tokens start and end."""
    slots = torch.tensor(lengths) + gap
    return torch.nn.functional.pad(slots.cumsum(0), (1, 0)).int()


class Packed:
    """A packed call, and the same by a loop over its sequences."""

    def __init__(
        self,
        lengths_q: tuple[int, ...] = LENGTHS_Q,
        lengths_kv: tuple[int, ...] = LENGTHS_KV,
        *,
        heads: tuple[int, int, int] = (H, 2, 1),
        dtype: torch.dtype = torch.float64,
        gap: int = 0,
        tail: int = 2,
        sinks: bool = False,
        **options: Any,
    ) -> None:
        self.lengths = lengths_q, lengths_kv
        self.cu = starts(lengths_q, gap), starts(lengths_kv, gap)
        tokens = [int(cu[-1]) + tail for cu in self.cu]
        shapes = zip((tokens[0], tokens[1], tokens[1]), heads, (D, D, 2 * D), strict=True)
        self.leaves = [torch.randn(*shape).to(dtype) for shape in shapes]
        self.options = options
        if gap:
            self.options |= {"seq_lens_q": lens(*lengths_q), "seq_lens_kv": lens(*lengths_kv)}
        for tensor, side in zip(self.leaves, (0, 1, 1), strict=True):
            tensor[self.nobodys(side)] = math.nan
        if sinks:
            self.leaves.append(torch.randn(heads[0]))
        for leaf in self.leaves:
            leaf.requires_grad_()

    def places(self, side: int) -> list[slice]:
        firsts = self.cu[side].tolist()
        return [slice(a, a + n) for a, n in zip(firsts, self.lengths[side], strict=False)]

    def nobodys(self, side: int) -> Tensor:
        """Which tokens belong to no sequence."""
        found = torch.ones(self.leaves[1 if side else 0].shape[0], dtype=torch.bool)
        for place in self.places(side):
            found[place] = False
        return found

    def ours(self, **more: Any) -> tuple[Tensor, Tensor]:
        sinks = {"sinks": self.leaves[3]} if len(self.leaves) > 3 else {}
        longest = max(self.lengths[0]), max(self.lengths[1])
        found: Any = cudnn_sdpa_varlen(
            *self.leaves[:3], *self.cu, *longest, return_lse=True, **self.options, **sinks, **more
        )
        return found[0], found[1]

    def exact(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Leaves, output and log-sum-exp in float64."""
        o = dict(self.options)
        heads = self.leaves[0].shape[1]
        slopes = reference.alibi_slopes(heads) if o.pop("alibi", False) else None
        slopes = o.pop("alibi_slopes", slopes)
        bottom_right = o.pop("causal_alignment", "top_left") == "bottom_right"
        window = o.pop("window", (-1, -1))
        if o.get("is_causal"):
            window = (window[0], -1)
        o = {k: v for k, v in o.items() if not k.startswith("seq_lens")}
        leaves = [t.detach().double().requires_grad_() for t in self.leaves]
        query, key, value = leaves[:3]
        output = torch.zeros(query.shape[0], heads, value.shape[2], dtype=torch.float64)
        lse = torch.full((heads, query.shape[0]), -math.inf, dtype=torch.float64)
        for rows, columns in zip(self.places(0), self.places(1), strict=True):
            own, sums = reference.attention(
                query[rows].transpose(0, 1),
                key[columns].transpose(0, 1),
                value[columns].transpose(0, 1),
                alibi_slopes=slopes,
                bottom_right=bottom_right,
                window=window,
                sinks=leaves[3] if len(leaves) > 3 else None,
                **o,
            )
            output[rows] = own.transpose(0, 1)
            lse[:, rows] = sums.detach()
        return leaves, output, lse

    def assert_right(self, tolerance: float = 1e-6, *, gradients: bool = True, **more: Any) -> None:
        leaves, want, sums = self.exact()
        with torch.set_grad_enabled(gradients):
            got, lse = self.ours(**more)
        assert got.is_contiguous()
        assert (got.dtype, lse.dtype) == (self.leaves[0].dtype, torch.float32)

        def close(one: Tensor, other: Tensor) -> None:
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)

        close(got, want)
        close(lse, sums)
        if gradients:
            upstream = torch.randn(want.shape).to(got.dtype)
            wanted = torch.autograd.grad(want, leaves, upstream.double())
            upstream[self.nobodys(0)] = math.nan
            found = torch.autograd.grad(got, self.leaves, upstream)
            for one, other in zip(found, wanted, strict=True):
                close(one, other)


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("band", BAND)
def test_fallback(band: str, scores: str, gap: int) -> None:
    Packed(gap=gap, sinks=True, **BAND[band], **SCORES[scores]).assert_right()


def test_fallback_with_other_options() -> None:
    Packed(heads=(H, H, H), scale=-0.3).assert_right()
    Packed(alibi_slopes=torch.rand(H)).assert_right()
    Packed().assert_right(gradients=False)
    assert Packed().ours()[1].requires_grad


def test_what_is_longer_than_the_longest_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and slots alike, so that the diagonal ends where the sequence does."""
    monkeypatch.setattr(packed, "on_host", lambda *_: False)  # as on a device
    query, key = torch.randn(9, H, D), torch.randn(9, H, D)
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    cu_q, cu_kv = lens(0, 4, 9), lens(0, 6, 9)
    got: Any = cudnn_sdpa_varlen(query, key, key, cu_q, cu_kv, 3, 4, **options)
    lengths = {"seq_lens_q": lens(3, 3), "seq_lens_kv": lens(4, 3)}
    want = cudnn_sdpa_varlen(query, key, key, cu_q, cu_kv, 3, 4, **lengths, **options)
    assert torch.equal(got, want)
    assert (got[3] == 0).all() and (got[7:] == 0).all() and (got[4:7] != 0).all()
    more = {"seq_lens_q": lens(8, 3), "seq_lens_kv": lens(9, 50)}
    assert torch.equal(
        cudnn_sdpa_varlen(query, key, key, cu_q, cu_kv, 3, 4, **more, **options), want
    )


def test_nothing_to_compute() -> None:
    query, key = torch.randn(4, H, D), torch.randn(0, H, D)
    cu = lens(0, 4), lens(0, 0)
    got, lse = cudnn_sdpa_varlen(query, key, key, *cu, 4, 0, return_lse=True)
    assert (got.shape, got.abs().sum()) == ((4, H, D), 0)
    assert (lse == -math.inf).all()
    none: Any = cudnn_sdpa_varlen(query[:0], key, key, lens(0), lens(0), 0, 0, fallback=False)
    assert none.shape == (0, H, D)


def test_without_a_fallback_every_reason_is_raised() -> None:
    with pytest.raises(CudnnSdpaUnsupportedError, match="must be on a CUDA device") as caught:
        Packed().ours(fallback=False)
    assert [reason.rule for reason in caught.value.reasons] == ["device"]


Q, K, CU = torch.randn(6, 4, 8), torch.randn(9, 2, 8), lens(0, 2, 6)
CALL: dict[str, Any] = {
    "query": Q,
    "key": K,
    "value": K,
    "cu_seqlens_q": CU,
    "cu_seqlens_kv": lens(0, 3, 9),
    "max_seqlen_q": 4,
    "max_seqlen_kv": 6,
}
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": Q[None]}, ValueError, r"query must be packed, \(tokens, H, D\), got \(1, 6, 4, 8\)"),
    ({"value": K[0]}, ValueError, r"value must be packed"),
    ({"key": K.half()}, TypeError, "query, key and value must have the same floating-point dtype"),
    ({"value": K.to("meta")}, RuntimeError, "value must be on the device of query, cpu, got meta"),
    ({"key": K[:, [0, 1, 1]]}, ValueError, "the heads of key must divide those of query, got 3 an"),
    ({"key": K[..., :4]}, ValueError, "query and key must have the same head dimension, got 8 and"),
    ({"value": K[1:]}, ValueError, "key and value must have the same tokens, got 9 and 8"),
    ({"cu_seqlens_q": CU[None]}, ValueError, r"cu_seqlens_q must be of shape \(B \+ 1,\), got"),
    ({"cu_seqlens_q": CU[:0]}, ValueError, r"cu_seqlens_q must be of shape \(B \+ 1,\), got \(0"),
    ({"cu_seqlens_kv": CU[1:]}, ValueError, r"cu_seqlens_kv must be of shape \(3,\), got \(2,\)"),
    ({"cu_seqlens_q": CU.float()}, TypeError, "cu_seqlens_q must be int32 or int64, got torch.f"),
    ({"cu_seqlens_q": lens(0, 2, 7)}, ValueError, "cu_seqlens_q must .* end at 6, .* got 0 and 7"),
    ({"cu_seqlens_q": lens(-1, 2, 6)}, ValueError, "cu_seqlens_q must start at 0 or .* got -1 and"),
    (
        {"cu_seqlens_kv": lens(0, 8, 3)},
        ValueError,
        "cu_seqlens_kv must ascend, got 8 and then 3 for sequence 1",
    ),
    ({"seq_lens_q": lens(2, 5)}, ValueError, "seq_lens_q must be from 0 to 4, .* 1, got 5"),
    ({"seq_lens_kv": lens(-1, 6)}, ValueError, "seq_lens_kv must be from 0 to 3, .* 0, got -1"),
    ({"seq_lens_q": lens(1)}, ValueError, r"seq_lens_q must be of shape \(2,\), got \(1,\)"),
    ({"seq_lens_kv": [1, 2]}, TypeError, "seq_lens_kv must be a torch.Tensor or None, got list"),
    ({"sinks": torch.ones(2)}, ValueError, r"sinks must be of shape \(4,\), got \(2,\)"),
    (
        {"alibi_slopes": torch.ones(4, requires_grad=True)},
        ValueError,
        "alibi_slopes has no gradient; detach it",
    ),
    ({"max_seqlen_q": 4.0}, TypeError, "max_seqlen_q must be a whole number, got 4.0"),
    ({"max_seqlen_kv": True}, TypeError, "max_seqlen_kv must be a whole number, got True"),
    ({"max_seqlen_kv": -1}, ValueError, "max_seqlen_kv must not be negative, got -1"),
    ({"query": 3}, TypeError, "query must be a torch.Tensor, got int"),
    ({"dropout_p": -0.1}, ValueError, r"dropout_p must be in \[0, 1\], got -0.1"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_what_means_nothing_is_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        cudnn_sdpa_varlen(**(CALL | changes))


# --------------------------------------------------------------------------------- interpreted


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("band", ["none", "causal", "bottom right window", "bottom right both"])
def test_plans_are_told_what_makes_them_right(
    monkeypatch: pytest.MonkeyPatch, band: str, gap: int
) -> None:
    machine = interpreter.install(monkeypatch, packed, padded)
    options = BAND[band]
    for sinks in (False, True):
        for gradients in (False, True):
            case = Packed(dtype=torch.float16, gap=gap, sinks=sinks, **options)
            case.assert_right(6e-3, gradients=gradients, fallback=False)
    assert len(machine.runs) == 6
    # Sinks with gradients go through a padded batch.
    assert [spec.sinks for spec in machine.specs if not spec.ragged] == [True, True]


def test_a_soft_cap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.install(monkeypatch, packed, padded)
    case = Packed(dtype=torch.float16, softcap=1.5)
    with pytest.raises(CudnnSdpaUnsupportedError, match="score_operations"):
        case.ours(fallback=False)
    case.assert_right(6e-3)


@pytest.mark.parametrize("mode", ["exact", "auto"])
def test_plans_of_every_mode(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    interpreter.install(monkeypatch, packed, padded)
    settings = config.settings()
    changed = dataclasses.replace(settings, lengths=mode)
    monkeypatch.setattr(config, "settings", lambda: changed)
    case = Packed((1, 1, 1), (4, 2, 9), dtype=torch.float16)
    case.assert_right(6e-3, fallback=False)
    case = Packed((5, 0, 2, 7, 1), (4, 2, 9, 0, 3), dtype=torch.float16, alibi=True, is_causal=True)
    case.assert_right(6e-3, fallback=False)


def test_views_of_one_buffer_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = interpreter.install(monkeypatch, packed)
    qkv = torch.randn(9, 3, H, D).half()
    cu = lens(0, 2, 9)
    got: Any = cudnn_sdpa_varlen(*qkv.unbind(1), cu, cu, 7, 7, is_causal=True, fallback=False)
    assert machine.specs[0].query.stride[2] == 3 * H * D
    for a, b in ((0, 2), (2, 9)):
        own, _ = reference.attention(
            *(t[a:b].transpose(0, 1) for t in qkv.unbind(1)), None, 0, True
        )
        torch.testing.assert_close(got[a:b], own.transpose(0, 1), rtol=6e-3, atol=6e-3)


def test_batches_up_to_the_next_powers_of_two_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = interpreter.install(monkeypatch, packed)
    for lengths in ((100, 3, 77, 1, 5), (128, 100, 2, 2, 2, 2, 2), (1, 2, 3, 4, 5, 6, 7, 8)):
        Packed(lengths, lengths, dtype=torch.float16, tail=0).ours(fallback=False)
    assert len(set(machine.specs)) == len({(s.direction, s.tokens_q) for s in machine.specs})
    assert {spec.batch for spec in machine.specs} == {8}


# ------------------------------------------------------------------------------------- pieces


def test_sequences_are_lengths_and_offsets() -> None:
    """More sequences than there are, as plans are made for, are empty ones at the end."""
    case = Packed((3, 0, 5), (4, 2, 1), dtype=torch.float16)
    given = Given(*case.leaves, starts_q=case.cu[0], starts_kv=case.cu[1])
    route = meta_route(given, (4, 128, 128, 128, 128), gradient=True)
    found = packed.sequences_of(route, given, 4, 4)
    assert found[Uid.SEQ_LEN_Q].tolist() == [3, 0, 4, 0]
    assert found[Uid.SEQ_LEN_KV].tolist() == [4, 2, 1, 0]
    ends_q, ends_kv = torch.tensor([0, 3, 3, 8, 8]), torch.tensor([0, 4, 6, 7, 7])
    strides = {
        Uid.OFFSET_QUERY: ends_q * H * D,
        Uid.OFFSET_OUTPUT: ends_q * H * 2 * D,
        Uid.OFFSET_LSE: ends_q * H,
        Uid.OFFSET_GRAD_OUTPUT: ends_q * H * 2 * D,
        Uid.OFFSET_GRAD_QUERY: ends_q * H * D,
        Uid.OFFSET_KEY: ends_kv * 2 * D,
        Uid.OFFSET_VALUE: ends_kv * 2 * D,
        Uid.OFFSET_GRAD_KEY: ends_kv * 2 * D,
        Uid.OFFSET_GRAD_VALUE: ends_kv * 2 * D,
    }
    assert {uid: found[uid].tolist() for uid in strides} == {
        uid: want.tolist() for uid, want in strides.items()
    }
    assert {found[uid].dtype for uid in strides} == {torch.int64}
    assert set(found) == {Uid.SEQ_LEN_Q, Uid.SEQ_LEN_KV, *strides}
    fewer = given._replace(lengths_q=lens(2, 5, -1), lengths_kv=lens(9, 1, 0).long())
    found = packed.sequences_of(route, fewer, 4, 4)
    assert found[Uid.SEQ_LEN_Q].tolist() == [2, 0, 0, 0]
    assert found[Uid.SEQ_LEN_KV].tolist() == [4, 1, 0, 0]
    assert found[Uid.SEQ_LEN_KV].dtype == torch.int32


def meta_route(
    given: Given,
    sizes: tuple[int, int, int, int, int],
    *,
    gradient: bool = False,
    terms: Terms | None = None,
    profile: str = "h200",
) -> Route:
    """As decided for a described GPU by cuDNN's proposals."""
    device = devices.described(profile)
    found = packed._describe(given, sizes, Options(), terms or Terms(), gradient, False, device)
    assert found.reasons == ()
    for spec in found.graphs:
        words = refusal(spec, device)
        assert words is None, words
    return found


@pytest.mark.parametrize("profile", ["h200", "a100-sxm-80gb", "b200"])
@pytest.mark.parametrize("gradient", [False, True])
def test_cudnn_plans_packed_calls(gradient: bool, profile: str) -> None:
    tensors = [torch.empty(50, h, 64, dtype=torch.float16, device="meta") for h in (4, 2, 2)]
    given = Given(*tensors, starts_q=CU, starts_kv=CU)
    if gradient and profile == "a100-sxm-80gb":
        with pytest.raises(AssertionError, match="not supported for bprop thd on SM8X"):
            meta_route(given, (4, 128, 256, 512, 512), gradient=True, profile=profile)
        return
    for terms in (Terms(), Terms(None, 0), Terms(40, 0, True)):
        found = meta_route(
            given, (4, 128, 256, 512, 512), gradient=gradient, terms=terms, profile=profile
        )
        assert found.spec is not None
        assert (found.spec.batch, found.spec.seq_q, found.spec.seq_kv) == (4, 128, 256)
        assert found.packed


@pytest.mark.parametrize(
    ("dim", "sizes", "bound"),
    [
        (64, (4, 128, 256, 512, 512), None),  # half of a padded batch is filled
        (64, (4, 128, 256, 128, 512), 128),
        (64, (4, 128, 256, 512, 384), 512),
        (40, (4, 128, 256, 128, 256), None),  # for a head dimension that takes no bound
    ],
)
def test_the_workspace_of_a_sparse_backward_is_bounded(
    dim: int, sizes: tuple[int, int, int, int, int], bound: int | None
) -> None:
    tensors = [torch.empty(50, h, dim, dtype=torch.float16, device="meta") for h in (4, 2, 2)]
    given = Given(*tensors, starts_q=CU, starts_kv=CU)
    found = meta_route(given, sizes, gradient=True)
    assert found.spec is not None
    assert (found.spec.tokens_q, found.spec.tokens_kv) == (bound, bound and sizes[4])
    assert meta_route(given, sizes).spec.tokens_q is None  # type: ignore[union-attr]
    query = torch.empty(50, 12, dim, dtype=torch.float16)[:, :4]
    for dense in (True, False):
        read = packed.prepare(given._replace(query=query), Options(), dense_query=dense).query
        assert (read is query) != dense


def test_sizes_that_plans_are_made_for() -> None:
    given = Given(Q, K, K, starts_q=lens(*range(6)), starts_kv=lens(*range(6)))
    assert packed._sizes(given, 100, 300) == (8, 128, 512, bucket_of_tokens(6), 128)


def test_single_queries_beside_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for one query have no sinks: the padded batch has rows for more."""
    machine = interpreter.install(monkeypatch, padded, packed)
    Packed((1, 0, 1, 1), sinks=True, dtype=torch.float16).assert_right(6e-3, fallback=False)
    assert [spec.seq_q for spec in machine.runs if spec.backward] == [2]


@pytest.mark.parametrize("tail", [0, 2])
def test_through_padding(monkeypatch: pytest.MonkeyPatch, tail: int) -> None:
    """Values of the padded call come back to where their tokens are."""
    seen: list[Given] = []

    def attend(given: Given, options: Options, terms: Terms) -> tuple[Tensor, Tensor | None]:
        seen.append(given)
        output, lse = reference.attention(
            *given[:3], seq_lens_q=given.lengths_q, seq_lens_kv=given.lengths_kv, softcap=1.5
        )
        return output, lse if options.return_lse else None

    monkeypatch.setattr(padded, "attend", attend)
    case = Packed(gap=tail // 2, tail=tail, softcap=1.5)
    given = Given(
        *case.leaves,
        lengths_q=case.options.get("seq_lens_q"),
        lengths_kv=case.options.get("seq_lens_kv"),
        starts_q=case.cu[0],
        starts_kv=case.cu[1],
    )
    for lse in (True, False):
        options = Options(return_lse=lse)
        got, sums = packed._through_padding(given, 5, 7, options, Terms(softcap=1.5))
        leaves, want, right = case.exact()
        torch.testing.assert_close(got, want)
        assert (sums is not None) == lse
        if sums is not None:
            torch.testing.assert_close(sums.double(), right, rtol=1e-6, atol=1e-6)
        upstream = torch.randn_like(want)
        wanted = torch.autograd.grad(want, leaves, upstream)
        for one, other in zip(torch.autograd.grad(got, case.leaves, upstream), wanted, strict=True):
            torch.testing.assert_close(one, other)
    assert seen[0].query.shape == (4, H, 5, D)
    assert seen[0].key.shape == (4, 2, 7, D)
    assert seen[0].lengths_q is not None and seen[0].lengths_q.tolist() == [*LENGTHS_Q]
