"""Packed, paged and partial attention of the reference, against plain attention piece by piece."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha.reference import alibi_slopes, attention
from cudnn_mha.reference_layouts import merge, paged, varlen
from tests.test_reference import D, H, equal, inputs, normal, oracle

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "bottom_right": True},
    "everything": {
        "window": (3, 1),
        "bottom_right": True,
        "scale": 0.6,
        "softcap": 0.7,
        "alibi_slopes": alibi_slopes(H),
        "sinks": torch.linspace(-1, 1, H, dtype=torch.float64),
    },
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def with_sink_leaf(case: str) -> tuple[dict[str, Any], list[Tensor]]:
    options = dict(OPTIONS[case])
    if "sinks" not in options:
        return options, []
    options["sinks"] = options["sinks"].clone().requires_grad_()
    return options, [options["sinks"]]


# --- packed sequences


# Where slots start and stop, and how many of their tokens are real (None: all).
PACKED: dict[str, tuple[list[int], list[int], list[int] | None, list[int] | None]] = {
    "dense": ([0, 3, 4, 9], [0, 2, 7, 8], None, None),
    "empty sequences": ([0, 0, 4, 4, 6], [0, 3, 3, 3, 8], None, None),
    "gaps": ([0, 3, 5, 9], [0, 4, 7, 9], [2, 0, 4], [4, 2, 0]),
    "tails": ([1, 3, 6], [2, 5, 7], None, [1, 2]),
    "nothing": ([0, 0], [0, 0], None, None),
    "no sequences": ([0], [0], None, None),
}


def tokens_of(ends: list[int], lens: list[int] | None) -> list[slice]:
    lens = [b - a for a, b in itertools.pairwise(ends)] if lens is None else lens
    return [slice(a, a + n) for a, n in zip(ends, lens, strict=False)]


def tensors(*numbers: list[int] | None, dtype: torch.dtype = torch.int32) -> list[Tensor | None]:
    return [None if n is None else torch.tensor(n, dtype=dtype) for n in numbers]


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("layout", PACKED)
def test_packed_sequences_one_by_one(layout: str, extra: int, case: str) -> None:
    """With ``extra`` tokens behind the last slot; all that no sequence has is NaN."""
    ends_q, ends_kv, lens_q, lens_kv = PACKED[layout]
    options, sinks = with_sink_leaf(case)
    rows, keys = tokens_of(ends_q, lens_q), tokens_of(ends_kv, lens_kv)
    total_q, total_kv = ends_q[-1] + extra, ends_kv[-1] + extra
    real_q, real_kv = torch.zeros(total_q).bool(), torch.zeros(total_kv).bool()
    for own_q, own_kv in zip(rows, keys, strict=True):
        real_q[own_q], real_kv[own_kv] = True, True

    def poisoned(t: Tensor, real: Tensor) -> Tensor:
        return t.masked_fill(~real.view(-1, *[1] * (t.ndim - 1)), math.nan)

    q = poisoned(normal(total_q, H, D, grad=False), real_q).requires_grad_()
    k = poisoned(normal(total_kv, 2, D, grad=False), real_kv).requires_grad_()
    v = poisoned(normal(total_kv, 1, D + 2, grad=False), real_kv).requires_grad_()
    up = poisoned(normal(total_q, H, D + 2, grad=False), real_q)
    up_lse = poisoned(normal(total_q, H, grad=False), real_q).T

    grads = []
    for dtype, longest in (
        (torch.int32, {}),
        (torch.int64, {"max_seqlen_q": 6, "max_seqlen_kv": 7}),
    ):
        cu_q, cu_kv, seq_q, seq_kv = tensors(ends_q, ends_kv, lens_q, lens_kv, dtype=dtype)
        out, lse = varlen(
            q, k, v, cu_q, cu_kv, seq_lens_q=seq_q, seq_lens_kv=seq_kv, **longest, **options
        )
        grads.append(torch.autograd.grad((out, lse), (q, k, v, *sinks), (up, up_lse)))
    equal(grads[0], grads[1])
    assert (out.shape, lse.shape) == ((total_q, H, D + 2), (H, total_q))
    assert out.is_contiguous() and lse.is_contiguous()

    want_grads = [torch.zeros_like(t) for t in (q, k, v, *sinks)]
    for own_q, own_kv in zip(rows, keys, strict=True):
        parts = [t[own].transpose(0, 1) for t, own in ((q, own_q), (k, own_kv), (v, own_kv))]
        want, want_lse = oracle(*parts, **options)
        equal((out[own_q].transpose(0, 1), lse[:, own_q]), (want, want_lse))
        found = torch.autograd.grad(
            (want, want_lse),
            (q, k, v, *sinks),
            (up[own_q].transpose(0, 1), up_lse[:, own_q]),
            allow_unused=True,
        )
        # The graph of a slice gives a gradient to the whole: zeros outside of it.
        for total, grad in zip(want_grads, found, strict=True):
            total += 0 if grad is None else grad
    equal(grads[0], tuple(want_grads))
    assert torch.all(out[~real_q] == 0) and torch.all(lse[:, ~real_q] == -math.inf)
    for grad, real in zip(grads[0], (real_q, real_kv, real_kv), strict=False):
        assert torch.all(grad[~real] == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_dtypes(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(5, H, D).to(dtype) for _ in range(3))
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    out, lse = varlen(q, k, v, ends, ends)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    wide, wide_lse = varlen(q, k, v, ends, ends, compute_dtype=torch.float64)
    assert (wide.dtype, wide_lse.dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(out.double(), wide, rtol=2**-8, atol=1e-5)
    equal(lse.double(), wide_lse, 2e-6)


def test_packed_dropout_counts_rows_and_keys_within_sequences() -> None:
    q, k, v = normal(5, H, D), normal(6, H, D), normal(6, H, D)
    ends_q, ends_kv = [0, 2, 5], [0, 4, 6]
    keep = torch.rand(2, H, 3, 4) < 0.6
    cu_q, cu_kv = tensors(ends_q, ends_kv)
    out, lse = varlen(q, k, v, cu_q, cu_kv, dropout_p=0.4, dropout_mask=keep)
    for n, (i, j) in enumerate(zip(tokens_of(ends_q, None), tokens_of(ends_kv, None), strict=True)):
        parts = [t[own].transpose(0, 1) for t, own in ((q, i), (k, j), (v, j))]
        own = keep[n, :, : i.stop - i.start, : j.stop - j.start]
        want = oracle(*parts, dropout_p=0.4, dropout_mask=own)
        equal((out[i].transpose(0, 1), lse[:, i]), want)
    dropped, _ = varlen(q, k, v, cu_q, cu_kv, dropout_p=1.0)
    assert torch.all(dropped == 0)


def test_packed_lengths_stay_on_the_device_where_the_longest_are_given() -> None:
    """Tensors on meta have no values: reading one raises."""
    q, k = torch.empty(9, H, D, device="meta"), torch.empty(7, H, D, device="meta")
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    out, lse = varlen(
        q, k, k, ends, ends, seq_lens_q=ends[1:], max_seqlen_q=5, max_seqlen_kv=4, is_causal=True
    )
    assert (out.shape, lse.shape) == ((9, H, D), (H, 9))
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta tensors?"):
        varlen(q, k, k, ends, ends)


def test_packed_gradcheck() -> None:
    q, k, v, sinks = normal(6, 2, 2), normal(5, 1, 2), normal(5, 2, 2), normal(2)
    cu_q, cu_kv, lens_q = tensors([0, 2, 6], [0, 3, 5], [2, 3])

    def both(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = varlen(q, k, v, cu_q, cu_kv, seq_lens_q=lens_q, sinks=sinks, softcap=0.8)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(both, (q, k, v, sinks))


@pytest.mark.parametrize(
    "changes,name",
    [
        ({"query": torch.zeros(1, 5, H, D)}, "query"),
        ({"value": torch.zeros(4, H, D)}, "key"),
        ({"cu_seqlens_q": torch.zeros(3)}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, "cu_seqlens_q"),
        ({"cu_seqlens_kv": torch.zeros(4, dtype=torch.int32)}, "cu_seqlens_kv"),
        ({"seq_lens_q": torch.ones(2)}, "seq_lens_q"),
        ({"seq_lens_kv": torch.ones(3, dtype=torch.int32)}, "seq_lens_kv"),
        ({"key": torch.zeros(5, 3, D)}, "key"),
    ],
)
def test_packed_arguments_that_do_not_fit_are_named(changes: dict[str, Any], name: str) -> None:
    given = {n: torch.zeros(5, H, D) for n in ("query", "key", "value")}
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"^`{name}` must be .*, got .*; "):
        varlen(**{**given, "cu_seqlens_q": ends, "cu_seqlens_kv": ends, **changes})


# --- pages


PAGE, TABLE, LENS = 3, [[4, 0, 2], [1, 4, 5]], [5, 9]


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("lens", [LENS, [9, 9], [0, 4], [3, 6]])
def test_pages_are_the_keys_they_hold(lens: list[int], case: str) -> None:
    """What no sequence reads is NaN, and table entries of pages that none needs are nonsense."""
    options, sinks = with_sink_leaf(case)
    k_pages, v_pages = normal(6, 2, PAGE, D, grad=False), normal(6, 1, PAGE, D + 2, grad=False)
    table = torch.tensor(TABLE, dtype=torch.int32)
    used = torch.zeros(6, PAGE, dtype=torch.bool)
    for n, j in itertools.product(range(2), range(9)):
        if j < lens[n]:
            used[TABLE[n][j // PAGE], j % PAGE] = True
        elif j % PAGE == 0:
            table[n, j // PAGE] = (-1, 1000)[n]
    q = normal(2, H, 4, D)
    for pages in (k_pages, v_pages):
        pages.masked_fill_(~used[:, None, :, None], math.nan).requires_grad_()
    up, up_lse = normal(2, H, 4, D + 2, grad=False), normal(2, H, 4, grad=False)

    leaves = (q, k_pages, v_pages, *sinks)
    out, lse = paged(q, k_pages, v_pages, table, torch.tensor(lens), **options)
    grads = torch.autograd.grad((out, lse), leaves, (up, up_lse))
    assert all(grad.isfinite().all() for grad in grads)

    want_grads = [torch.zeros_like(t) for t in leaves]
    for n in range(2):
        k, v = (torch.cat([t[page] for page in TABLE[n]], -2)[:, : lens[n]] for t in leaves[1:3])
        want, want_lse = oracle(q[n], k, v, **options)
        equal((out[n], lse[n]), (want, want_lse))
        found = torch.autograd.grad((want, want_lse), leaves, (up[n], up_lse[n]), allow_unused=True)
        # A page that sequences share, or that one has twice, adds up.
        for total, grad in zip(want_grads, found, strict=True):
            total += 0 if grad is None else grad
    equal(grads, tuple(want_grads))


def test_pages_with_query_lengths_and_dropout() -> None:
    q, k_pages, v_pages = normal(2, H, 4, D), normal(6, 2, PAGE, D), normal(6, 1, PAGE, D)
    table, lens, lens_q = torch.tensor(TABLE), torch.tensor(LENS), torch.tensor([4, 1])
    keep = torch.rand(H, 4, 9) < 0.6
    out, lse = paged(
        q,
        k_pages,
        v_pages,
        table,
        lens,
        seq_lens_q=lens_q,
        dropout_p=0.4,
        dropout_mask=keep,
        compute_dtype=torch.float64,
    )
    for n in range(2):
        k, v = (
            torch.cat([t[page] for page in TABLE[n]], -2)[:, : LENS[n]] for t in (k_pages, v_pages)
        )
        rows = slice(0, int(lens_q[n]))
        own = keep[:, rows, : LENS[n]]
        want = oracle(q[n, :, rows], k, v, dropout_p=0.4, dropout_mask=own)
        equal((out[n, :, rows], lse[n, :, rows]), want)
    assert torch.all(out[1, :, 1:] == 0) and torch.all(lse[1, :, 1:] == -math.inf)


@pytest.mark.parametrize("pages,columns", [(0, 2), (3, 0), (0, 0)])
def test_no_pages(pages: int, columns: int) -> None:
    q, cache = normal(2, H, 4, D), normal(pages, H, PAGE, D)
    table = torch.zeros(2, columns, dtype=torch.int32)
    out, lse = paged(q, cache, cache, table, torch.tensor([0, 0]))
    assert torch.equal(out, torch.zeros_like(q)) and torch.all(lse == -math.inf)


def test_page_tables_are_never_read_on_the_host() -> None:
    q, cache = torch.empty(2, H, 4, D, device="meta"), torch.empty(6, H, PAGE, D, device="meta")
    table = torch.empty(2, 3, dtype=torch.int32, device="meta")
    out, lse = paged(q, cache, cache, table, table[:, 0], bottom_right=True, is_causal=True)
    assert (out.shape, lse.shape) == ((2, H, 4, D), (2, H, 4))


@pytest.mark.parametrize(
    "changes,name",
    [
        ({"query": torch.zeros(H, 4, D)}, "query"),
        ({"key_pages": torch.zeros(6, H, PAGE + 1, D)}, "key_pages"),
        ({"value_pages": torch.zeros(5, H, PAGE, D)}, "key_pages"),
        ({"value_pages": torch.zeros(H, PAGE, D)}, "value_pages"),
        ({"block_table": torch.zeros(2, 3)}, "block_table"),
        ({"block_table": torch.zeros(3, 3, dtype=torch.int32)}, "block_table"),
        ({"block_table": torch.zeros(2, dtype=torch.int32)}, "block_table"),
        ({"seq_lens_kv": torch.zeros(3, dtype=torch.int32)}, "seq_lens_kv"),
        ({"seq_lens_kv": torch.zeros(2)}, "seq_lens_kv"),
    ],
)
def test_page_arguments_that_do_not_fit_are_named(changes: dict[str, Any], name: str) -> None:
    given = {
        "query": torch.zeros(2, H, 4, D),
        "key_pages": torch.zeros(6, H, PAGE, D),
        "value_pages": torch.zeros(6, H, PAGE, D),
        "block_table": torch.tensor(TABLE),
        "seq_lens_kv": torch.tensor(LENS),
    }
    with pytest.raises(ValueError, match=rf"^`{name}` must be .*, got .*; "):
        paged(**{**given, **changes})


# --- keys in parts


@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 9], [0, 1, 1, 6, 9]])
@pytest.mark.parametrize("sink_in", [None, 0, -1])
def test_parts_make_the_whole(cuts: list[int], sink_in: int | None) -> None:
    q, k, v = inputs(hk=2, hv=1, skv=9)
    mask = torch.rand(2, H, 5, 9) < 0.5
    mask[0, 0, 1] = False
    mask[:, :, 2, :4] = False
    sinks = None if sink_in is None else normal(H)
    leaves = [t for t in (q, k, v, sinks) if t is not None]
    whole, whole_lse = oracle(q, k, v, mask, sinks=sinks)
    parts = [
        oracle(q, k[:, :, a:b], v[:, :, a:b], mask[..., a:b]) for a, b in itertools.pairwise(cuts)
    ]
    if sink_in is not None:
        a, b = (cuts[0], cuts[1]) if sink_in == 0 else (cuts[-2], cuts[-1])
        parts[sink_in] = oracle(q, k[:, :, a:b], v[:, :, a:b], mask[..., a:b], sinks=sinks)
    out, lse = merge(*zip(*parts, strict=True))
    equal((out, lse), (whole, whole_lse))
    up, up_lse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), leaves, (up, up_lse))
    equal(got, torch.autograd.grad((whole, whole_lse), leaves, (up, up_lse)))


def test_parts_without_keys_count_nothing() -> None:
    outs = [normal(2, 3, 4, grad=False) for _ in range(3)]
    lses = [normal(2, 3, grad=False) for _ in range(3)]
    dead = torch.tensor([[True, False, True], [False, False, True]])
    outs[1][dead], lses[1][dead] = math.nan, -math.inf
    for n in (0, 2):
        outs[n][1, 2], lses[n][1, 2] = math.inf, -math.inf
    leaves = [t.requires_grad_() for t in (*outs, *lses)]
    out, lse = merge(outs, lses)
    two, two_lse = merge(outs[::2], lses[::2])
    equal((out[dead], lse[dead]), (two[dead], two_lse[dead]))
    assert torch.all(out[1, 2] == 0) and lse[1, 2] == -math.inf
    assert out.isfinite().all() and lse[~dead].isfinite().all()
    up, up_lse = torch.ones_like(out), torch.ones_like(lse)
    up[1, 2], up_lse[1, 2] = math.nan, math.nan
    grads = torch.autograd.grad((out, lse), leaves, (up, up_lse))
    assert all(grad.isfinite().all() for grad in grads)
    assert torch.all(grads[1][dead] == 0) and torch.all(grads[4][dead] == 0)
    assert torch.all(grads[1][~dead] != 0) and torch.all(grads[4][~dead] != 0)
    for grad in grads:
        assert torch.all(grad[1, 2] == 0)


def test_merge_of_logits_far_apart() -> None:
    """Two values, weighed by a softmax that is known exactly, however large the logits are."""
    for size in (1e4, -1e4):
        outs = [torch.ones(1, 1), torch.zeros(1, 1)]
        out, lse = merge(outs, [torch.tensor([size]), torch.tensor([size - 1])])
        first = 1 / (1 + math.exp(-1))
        equal(out.item(), first, 1e-6)
        equal(lse.item(), size - math.log(first), 1e-6)


def test_merge_dtypes() -> None:
    halves = [torch.randn(2, 3, 4).bfloat16() for _ in range(2)]
    lses = [torch.randn(2, 3) for _ in range(2)]
    out, lse = merge(halves, lses)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    exact, exact_lse = merge(halves, [t.double() for t in lses])
    assert (exact.dtype, exact_lse.dtype) == (torch.float64, torch.float64)
    equal((out.double(), lse.double()), (exact, exact_lse), 1e-6)
    single, single_lse = merge(halves[:1], lses[:1])
    assert torch.equal(single, halves[0].float()) and torch.equal(single_lse, lses[0])


def test_merge_gradcheck() -> None:
    parts = [normal(2, 3, 2) for _ in range(3)] + [normal(2, 3) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *t: merge(t[:3], t[3:]), parts)


@pytest.mark.parametrize(
    "outs,lses,name",
    [
        ([], [], "lses"),
        ([torch.zeros(3, 2)], [], "lses"),
        ([torch.zeros(3, 2), torch.zeros(1, 2)], [torch.zeros(3)] * 2, r"outputs\[1\]"),
        ([torch.zeros(3, 2)] * 2, [torch.zeros(3), torch.zeros(1)], r"lses\[1\]"),
    ],
)
def test_parts_that_do_not_fit_are_named(outs: list[Tensor], lses: list[Tensor], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^`{name}` must be .*, got .*; "):
        merge(outs, lses)


def test_parts_that_are_no_tensors_are_named() -> None:
    output, lse = normal(2, 3, 2), normal(2, 3)
    with pytest.raises(TypeError, match="`outputs` must be a list of tensors"):
        merge(output, lse)
    with pytest.raises(TypeError, match="`lses` must be a list of tensors"):
        merge([output], [3.0])  # type: ignore[list-item]


def test_parts_that_are_no_floating_point_are_named() -> None:
    output, lse = normal(2, 3, 2), normal(2, 3)
    with pytest.raises(TypeError, match=r"^`outputs\[1\]` must be floating point, got torch.int32"):
        merge([output, output.int()], [lse, lse])
    with pytest.raises(TypeError, match=r"^`lses\[0\]` must be floating point, got torch.bool"):
        merge([output], [lse > 0])


def test_padded_parts_merge_to_padding() -> None:
    """Lengths of the whole say those of the parts, as a sharded cache has them."""
    q, k, v = inputs(skv=8)
    lens = torch.tensor([3, 7])
    parts = [
        attention(
            q,
            k[:, :, a : a + 4],
            v[:, :, a : a + 4],
            seq_lens_q=torch.tensor([5, 2]),
            seq_lens_kv=(lens - a).clamp(0, 4),
        )
        for a in (0, 4)
    ]
    want = attention(q, k, v, seq_lens_q=torch.tensor([5, 2]), seq_lens_kv=lens)
    equal(merge(*zip(*parts, strict=True)), want)
