"""FlashAttention's functions against its documented definitions, in float64 on the CPU.

The GPU tests make sure that cuDNN computes the ordinary calls, and hold them to the rule of
`tests.oracle`.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cudnn_mha import (
    cudnn_sdpa,
    cudnn_sdpa_paged,
    cudnn_sdpa_varlen,
    dispatch,
    explain,
    explain_paged,
    explain_varlen,
)
from cudnn_mha.integrations import flash_attn
from cudnn_mha.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from tests.oracle import Call, Results, assert_right
from tests.support import no_waits

F64 = torch.float64
B, H, HK, D = 3, 4, 2, 8

COMMON = (
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
)
NEEDED = inspect.Parameter.empty
SIDES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

SIGNATURES: dict[str, tuple[tuple[str, Any], ...]] = {
    "flash_attn_func": (("q", NEEDED), ("k", NEEDED), ("v", NEEDED), *COMMON),
    "flash_attn_kvpacked_func": (("q", NEEDED), ("kv", NEEDED), *COMMON),
    "flash_attn_qkvpacked_func": (("qkv", NEEDED), *COMMON),
    "flash_attn_varlen_func": (
        *((name, NEEDED) for name in ("q", "k", "v", *SIDES)),
        *COMMON,
        ("block_table", None),
    ),
    "flash_attn_varlen_kvpacked_func": (
        *((name, NEEDED) for name in ("q", "kv", *SIDES)),
        *COMMON,
    ),
    "flash_attn_varlen_qkvpacked_func": (
        *((name, NEEDED) for name in ("qkv", "cu_seqlens", "max_seqlen")),
        *COMMON,
    ),
    "flash_attn_with_kvcache": (
        ("q", NEEDED),
        ("k_cache", NEEDED),
        ("v_cache", NEEDED),
        ("k", None),
        ("v", None),
        ("rotary_cos", None),
        ("rotary_sin", None),
        ("cache_seqlens", None),
        ("cache_batch_idx", None),
        ("cache_leftpad", None),
        ("block_table", None),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("rotary_interleaved", True),
        ("alibi_slopes", None),
        ("num_splits", 0),
        ("return_softmax_lse", False),
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attention_2(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert tuple((p.name, p.default) for p in parameters) == SIGNATURES[name]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert sorted(flash_attn.__all__) == sorted(SIGNATURES)


def test_the_package_does_not_load_it() -> None:
    code = "import sys, cudnn_mha; cudnn_mha.cudnn_sdpa; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if "integrations" in name]


# ----------------------------------------------------------------------------------------- oracle


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output ``(B, Sq, H, D)`` and log-sum-exp ``(B, H, Sq)`` as FlashAttention documents them."""
    seq_q, seq_k, heads = q.shape[1], k.shape[1], q.shape[2]
    group = heads // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(seq_q, device=q.device)[:, None]
    j = torch.arange(seq_k, device=q.device)
    middle = i + seq_k - seq_q
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(q.dtype).reshape(-1, heads, 1, 1)
        scores = scores - slopes * (middle - j).abs()
    left, right = window_size
    seen = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device)
    if left >= 0:
        seen &= j >= middle - left
    if right >= 0:
        seen &= j <= middle + right
    if causal:
        seen &= j <= middle
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1) if seq_k else scores.new_full(scores.shape[:3], -torch.inf)
    weights = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-10  # all log-sum-exps are float32
    torch.testing.assert_close(got.to(F64), want.to(F64), rtol=tolerance, atol=tolerance)


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=F64, requires_grad=grad)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "negative_scale": {"softmax_scale": -0.4},
    "causal": {"causal": True},
    "causal_by_window": {"window_size": (-1, 0)},
    "left": {"window_size": (2, -1)},
    "right": {"window_size": (-1, 1)},
    "window": {"window_size": (1, 2)},
    "window_unbounded": {"window_size": (-7, 3)},
    "causal_window": {"causal": True, "window_size": (2, 5)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 1.0])},
    "alibi_by_sequence": {"alibi_slopes": torch.arange(1.0, 13.0).view(B, H) / 9},
    "all": {
        "softmax_scale": 0.7,
        "causal": True,
        "window_size": (3, -1),
        "softcap": 2.0,
        "alibi_slopes": torch.arange(1.0, 13.0).view(B, H) / 9,
    },
}


def own(terms: dict[str, Any], b: int) -> dict[str, Any]:
    """The terms of one sequence."""
    slopes = terms.get("alibi_slopes")
    return terms if slopes is None or slopes.dim() == 1 else terms | {"alibi_slopes": slopes[b]}


# ------------------------------------------------------------------------------------------ dense


@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (6, 2), (1, 5)])
@pytest.mark.parametrize("terms", TERMS)
def test_dense(terms: str, lengths: tuple[int, int]) -> None:
    q = randn(B, lengths[0], H, D, grad=True)
    k, v = (randn(B, lengths[1], HK, D, grad=True) for _ in range(2))
    output, lse, dmask = flash_attn_func(q, k, v, **TERMS[terms], return_attn_probs=True)
    want, want_lse = definition(q, k, v, **TERMS[terms])
    close(output, want)
    close(lse, want_lse)
    assert dmask.numel() == 0
    assert dmask.dtype == q.dtype
    upstream = torch.randn_like(output)
    for got, expected in zip(
        torch.autograd.grad(output, (q, k, v), upstream),
        torch.autograd.grad(want, (q, k, v), upstream),
        strict=True,
    ):
        close(got, expected)
    alone = flash_attn_func(q, k, v, **TERMS[terms])
    assert isinstance(alone, Tensor)
    close(alone, want)
    assert alone.is_contiguous()


def test_rows_that_attend_to_nothing_give_zeros() -> None:
    q, k, v = randn(1, 5, H, D), randn(1, 2, H, D), randn(1, 2, H, D)
    output, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (output[:, :3] == 0).all()
    assert (lse[..., :3] == -torch.inf).all()
    assert (output[:, 3:] != 0).all()
    assert lse[..., 3:].isfinite().all()


def test_the_log_sum_exp_has_a_gradient() -> None:
    leaves = [randn(B, 5, H, D, grad=True) for _ in range(3)]
    output, lse, _ = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    want, want_lse = definition(*leaves, causal=True)
    for got, expected in zip(
        torch.autograd.grad(output.sum() + lse.square().sum(), leaves),
        torch.autograd.grad(want.sum() + want_lse.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_positional_arguments() -> None:
    q, k, v = (randn(B, 5, H, D) for _ in range(3))
    slopes = torch.rand(H)
    got = flash_attn_func(q, k, v, 0.0, 0.3, True, (2, 0), 1.5, slopes, True, True)
    want = definition(q, k, v, 0.3, True, (2, 0), 1.5, slopes)
    close(got[0], want[0])
    close(got[1], want[1])
    assert len(got) == 3


@pytest.mark.parametrize("terms", ["plain", "causal", "window", "alibi_by_sequence"])
def test_packed_projections(terms: str) -> None:
    options = TERMS[terms]
    qkv = randn(B, 5, 3, H, D, grad=True)
    q, kv = randn(B, 4, H, D, grad=True), randn(B, 6, 2, HK, D, grad=True)
    cases: tuple[tuple[Callable[..., Any], list[Tensor], list[Tensor]], ...] = (
        (flash_attn_qkvpacked_func, [qkv], list(qkv.unbind(2))),
        (flash_attn_kvpacked_func, [q, kv], [q, *kv.unbind(2)]),
    )
    for function, given, parts in cases:
        output, lse, _ = function(*given, **options, return_attn_probs=True)
        want, want_lse = definition(*parts, **options)
        close(output, want)
        close(lse, want_lse)
        grads = torch.autograd.grad(output.square().sum(), given)
        for got, expected in zip(
            grads, torch.autograd.grad(want.square().sum(), given), strict=True
        ):
            close(got, expected)


class Seen:
    """What reached `cudnn_sdpa`, and what it gave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "cudnn_sdpa") -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        real = getattr(flash_attn, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((args, kwargs))
            return real(*args, **kwargs)

        monkeypatch.setattr(flash_attn, name, spy)


def test_layouts_change_by_views_and_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    qkv = randn(B, 5, 3, H, D)
    output = flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True)
    (args, kwargs), *more = seen.calls
    assert not more
    for place, tensor in enumerate(args):
        assert tensor.data_ptr() == qkv[:, :, place].data_ptr()
        assert tensor.stride() == qkv[:, :, place].transpose(1, 2).stride()
    assert kwargs["deterministic"] is True
    # What PyTorch's function can say reaches the path that compilers and plans know best.
    assert kwargs["causal_alignment"] == "top_left"
    assert kwargs["window"] is kwargs["softcap"] is kwargs["seq_lens_kv"] is None
    assert output.is_contiguous()
    flash_attn_func(*(randn(B, n, H, D) for n in (1, 7, 7)), causal=True)
    assert seen.calls[1][1]["is_causal"] is False
    assert seen.calls[1][1]["causal_alignment"] == "top_left"
    assert seen.calls[1][1]["deterministic"] is None
    flash_attn_func(*(randn(B, n, H, D) for n in (3, 7, 7)))
    assert seen.calls[2][1]["causal_alignment"] == "top_left"
    flash_attn_func(*(randn(B, 7, H, D) for _ in range(3)), window_size=(-1, 0))
    assert seen.calls[3][1]["is_causal"] is True
    assert seen.calls[3][1]["window"] is None


def test_dropout_keeps_weights_scaled_or_drops_them() -> None:
    q, k = randn(2, 40, H, 40), randn(2, 40, H, 40)
    v = torch.eye(40, dtype=F64)[None, :, None].expand(2, 40, H, 40)  # shows the weights
    weights = flash_attn_func(q, k, v)
    dropped = flash_attn_func(q, k, v, 0.25)
    ratio = dropped / weights
    kept = ratio > 1e-6
    close(ratio[kept], torch.full_like(ratio[kept], 4 / 3))
    assert abs(1 - kept.double().mean().item() - 0.25) < 0.03
    starts = torch.tensor([0, 40, 80])
    flat = flash_attn_varlen_func(
        *(t.flatten(0, 1) for t in (q, k, v)), starts, starts, 40, 40, 0.25
    )
    ratio = flat / weights.flatten(0, 1)
    assert abs((ratio <= 1e-6).double().mean().item() - 0.25) < 0.03


def test_compilers_take_what_pytorchs_function_can_say_whole() -> None:
    qkv = randn(B, 5, 3, H, D, grad=True)
    compiled = torch.compile(flash_attn_qkvpacked_func, fullgraph=True, backend="aot_eager")
    output = compiled(qkv, causal=True)
    want, _ = definition(*qkv.unbind(2), causal=True)
    close(output, want)
    (got,) = torch.autograd.grad(output.square().sum(), qkv)
    close(got, torch.autograd.grad(want.square().sum(), qkv)[0])


STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
CACHE = randn(B, 16, H, D), randn(B, 16, H, D)
COMPILED: dict[str, Callable[[Tensor], Any]] = {
    "window": lambda q: flash_attn_func(q, q, q, causal=True, window_size=(3, 0)),
    "soft cap": lambda q: flash_attn_func(q, q, q, softcap=3.0),
    "packed": lambda q: flash_attn_varlen_func(
        *(q[0],) * 3, STARTS, STARTS, 5, 5, causal=True, window_size=(2, 0)
    ),
    "cache": lambda q: flash_attn_with_kvcache(
        q[:, :2].detach(), *CACHE, cache_seqlens=torch.tensor([5, 9, 16]), causal=True
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compilers_take_the_rest_whole_too(name: str) -> None:
    torch._dynamo.reset()
    query = randn(B, 9, H, D, grad=True)
    compiled = torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager")
    got, want = compiled(query), COMPILED[name](query)
    close(got, want)
    if want.requires_grad:
        upstream = torch.randn_like(want)
        one, other = (torch.autograd.grad(r, query, upstream)[0] for r in (got, want))
        # The operator's backward uses the log-sum-exp, which is float32.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------- packed


LENGTHS_Q, LENGTHS_K = (4, 1, 3), (6, 2, 0)


def starts(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    terms: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The definition for each sequence of a packed batch, packed again."""
    sides = (q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    found = [
        definition(*(t[None] for t in one), **own(terms, b))
        for b, one in enumerate(zip(*sides, strict=True))
    ]
    return torch.cat([o[0] for o, _ in found]), torch.cat([lse[0] for _, lse in found], -1)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("same", [False, True])
def test_varlen(terms: str, same: bool) -> None:
    options = TERMS[terms]
    lengths_k = LENGTHS_Q if same else LENGTHS_K
    q = randn(sum(LENGTHS_Q), H, D, grad=True)
    k, v = (randn(sum(lengths_k), HK, D, grad=True) for _ in range(2))
    cu_q = starts(LENGTHS_Q)
    cu_k = cu_q if same else starts(lengths_k)
    longest = max(LENGTHS_Q), max(lengths_k)
    call = (q, k, v, cu_q, cu_k, *longest)
    output, lse, dmask = flash_attn_varlen_func(*call, **options, return_attn_probs=True)
    want, want_lse = by_sequence(q, k, v, LENGTHS_Q, lengths_k, options)
    close(output, want)
    close(lse, want_lse)
    assert dmask.numel() == 0
    upstream = torch.randn_like(output)
    for got, expected in zip(
        torch.autograd.grad(output, (q, k, v), upstream),
        torch.autograd.grad(want, (q, k, v), upstream),
        strict=True,
    ):
        close(got, expected)
    alone = flash_attn_varlen_func(*call, **options)
    assert isinstance(alone, Tensor)
    close(alone, want)


@pytest.mark.parametrize("terms", ["plain", "causal", "alibi_by_sequence"])
def test_varlen_packed_projections(terms: str) -> None:
    options = TERMS[terms]
    qkv = randn(sum(LENGTHS_Q), 3, H, D, grad=True)
    q, kv = randn(sum(LENGTHS_Q), H, D), randn(sum(LENGTHS_K), 2, HK, D, grad=True)
    cu_q, cu_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    cases: tuple[tuple[Any, ...], ...] = (
        (flash_attn_varlen_qkvpacked_func, (qkv, cu_q, 4), qkv.unbind(1), LENGTHS_Q),
        (
            flash_attn_varlen_kvpacked_func,
            (q, kv, cu_q, cu_k, 4, 6),
            (q, *kv.unbind(1)),
            LENGTHS_K,
        ),
    )
    for function, given, parts, lengths_k in cases:
        output, lse, _ = function(*given, **options, return_attn_probs=True)
        want, want_lse = by_sequence(*parts, LENGTHS_Q, lengths_k, options)
        close(output, want)
        close(lse, want_lse)
        leaf = qkv if function is flash_attn_varlen_qkvpacked_func else kv
        (got,) = torch.autograd.grad(output.square().sum(), leaf)
        (expected,) = torch.autograd.grad(want.square().sum(), leaf)
        close(got, expected)


@pytest.mark.parametrize("window", [(-1, -1), (1, 0)])
def test_varlen_passes_its_options_on(
    monkeypatch: pytest.MonkeyPatch, window: tuple[int, int]
) -> None:
    seen = Seen(monkeypatch, "cudnn_sdpa_varlen")
    qkv, cu = randn(8, 3, H, D), starts(LENGTHS_Q)
    flash_attn_varlen_qkvpacked_func(qkv, cu, 4, 0.125, causal=True, window_size=window)
    flash_attn_varlen_func(*qkv.unbind(1), cu, cu.clone(), 4, 4, 0.0, None, True, window)
    ((args, first), (_, second)) = seen.calls
    assert args[0].data_ptr() == qkv.data_ptr()
    assert args[0].stride() == qkv[:, 0].stride()
    assert first["dropout_p"] == 0.125
    assert first["is_causal"] is second["is_causal"] is True
    assert first["causal_alignment"] == "top_left"
    assert second["causal_alignment"] == "bottom_right"


def in_pages(
    rows: Tensor, lengths: tuple[int, ...], size: int, spare: int = 2
) -> tuple[Tensor, Tensor]:
    """Packed keys in shuffled pages, and the table; unused slots hold zeros."""
    columns = -(-max(lengths) // size) + 1
    table = torch.randperm(len(lengths) * columns + spare)[: len(lengths) * columns]
    table = table.view(len(lengths), columns).to(torch.int32)
    pages = rows.new_zeros(len(lengths) * columns + spare, size, *rows.shape[1:])
    for b, sequence in enumerate(rows.split(lengths)):
        for place, row in enumerate(sequence):
            pages[table[b, place // size], place % size] = row
    return pages, table


@pytest.mark.parametrize("terms", TERMS)
def test_varlen_in_pages(terms: str) -> None:
    options = TERMS[terms]
    q = randn(sum(LENGTHS_Q), H, D)
    k, v = (randn(sum(LENGTHS_K), HK, D) for _ in range(2))
    torch.manual_seed(1)
    k_pages, table = in_pages(k, LENGTHS_K, 4)
    torch.manual_seed(1)
    v_pages, _ = in_pages(v, LENGTHS_K, 4)
    call = (q, k_pages, v_pages, starts(LENGTHS_Q), starts(LENGTHS_K), 4, 6)
    output, lse, _ = flash_attn_varlen_func(
        *call, **options, return_attn_probs=True, block_table=table
    )
    want, want_lse = by_sequence(q, k, v, LENGTHS_Q, LENGTHS_K, options)
    close(output, want)
    close(lse, want_lse)


# ------------------------------------------------------------------------------------------ cache


ROOM = 12


def turned(x: Tensor, cos: Tensor, sin: Tensor, places: list[int], interleaved: bool) -> Tensor:
    """Rotary embedding of one sequence ``(S, H, D)``, dimension by dimension."""
    half = cos.shape[1]
    result = x.clone()
    for row, place in enumerate(places):
        for n in range(half):
            a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + half)
            c, s = cos[place, n], sin[place, n]
            result[row, :, a] = x[row, :, a] * c - x[row, :, b] * s
            result[row, :, b] = x[row, :, b] * c + x[row, :, a] * s
    return result


class Cache:
    """A cache with new tokens, dense or in pages, and what is right for it."""

    def __init__(
        self,
        before: tuple[int, ...] = (5, 0, 9),
        new: int = 2,
        queries: int = 2,
        pages: bool = False,
        rows: tuple[int, ...] | None = None,
        leftpad: tuple[int, ...] | None = None,
    ) -> None:
        self.before, self.leftpad = before, leftpad or (0,) * len(before)
        self.rows = rows or tuple(range(len(before)))
        self.q = randn(len(before), queries, H, D)
        self.new = [randn(len(before), new, HK, D) if new else None for _ in range(2)]
        shape = (max(self.rows) + 2, ROOM, HK, D)
        self.dense = [randn(*shape) for _ in range(2)]
        self.options: dict[str, Any] = {}
        if rows is not None:
            self.options["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
        if leftpad is not None:
            self.options["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
        self.given = [t.clone() for t in self.dense]
        self.table: Tensor | None = None
        if pages:
            self.table = torch.randperm(20)[: 3 * len(before)].view(-1, 3).to(torch.int32)
            pools = [randn(20, 4, HK, D) for _ in range(2)]
            for pool, dense in zip(pools, self.dense, strict=True):
                pool[self.table.long()] = dense[: len(before)].unflatten(1, (3, 4))
            self.given = pools
            self.options["block_table"] = self.table

    def call(self, cache_seqlens: Any = "tensor", **options: Any) -> Any:
        if cache_seqlens == "tensor":
            cache_seqlens = torch.tensor(self.before, dtype=torch.int32)
        new = dict(zip("kv", self.new, strict=True))
        return flash_attn_with_kvcache(
            self.q, *self.given, **new, cache_seqlens=cache_seqlens, **self.options, **options
        )

    def content(self) -> list[Tensor]:
        """The caches as rows, whatever holds them."""
        if self.table is None:
            return self.given
        found = []
        for pool, dense in zip(self.given, self.dense, strict=True):
            rows = dense.clone()
            rows[: len(self.before)] = pool[self.table.long()].flatten(1, 2)
            found.append(rows)
        return found

    def assert_right(
        self,
        got: Any,
        rotary: tuple[Tensor, Tensor] | None = None,
        interleaved: bool = True,
        **terms: Any,
    ) -> None:
        """Output, log-sum-exp and the caches."""
        moving = terms.get("causal", False) or terms.get("window_size", (-1, -1)) != (-1, -1)
        after = [t.clone() for t in self.dense]
        for b, (start, row) in enumerate(zip(self.before, self.rows, strict=True)):
            end, query = start, self.q[b]
            if self.new[0] is not None and self.new[1] is not None:
                key, value = self.new[0][b], self.new[1][b]
                end = start + len(key)
                if rotary is not None:
                    key = turned(key, *rotary, list(range(start, end)), interleaved)
                    steps = [start + i * moving for i in range(len(query))]
                    query = turned(query, *rotary, steps, interleaved)
                after[0][row, start:end], after[1][row, start:end] = key, value
            own_cache = (t[None, row, self.leftpad[b] : end] for t in after)
            want, want_lse = definition(query[None], *own_cache, **own(terms, b))
            close(got[0][b], want[0])
            close(got[1][b], want_lse[0])
        for found, expected in zip(self.content(), after, strict=True):
            close(found, expected)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "pages": {"pages": True},
    "rows": {"rows": (4, 0, 2)},
    "leftpad": {"leftpad": (2, 0, 7)},
    "rows_and_leftpad": {"rows": (1, 5, 0), "leftpad": (1, 0, 9)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("terms", TERMS)
def test_cache(terms: str, layout: str) -> None:
    case = Cache(**LAYOUTS[layout])
    case.assert_right(case.call(**TERMS[terms], return_softmax_lse=True), **TERMS[terms])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("new", "queries"), [(0, 1), (1, 1), (3, 1), (1, 3), (0, 4)])
def test_cache_lengths(new: int, queries: int, layout: str) -> None:
    case = Cache(new=new, queries=queries, **LAYOUTS[layout])
    case.assert_right(case.call(causal=True, return_softmax_lse=True), causal=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [D, 4])
@pytest.mark.parametrize("terms", ["plain", "causal", "window"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_rotary(layout: str, terms: str, size: int, interleaved: bool) -> None:
    angles = torch.outer(torch.arange(ROOM + 1.0), torch.tensor([1.0, 0.3, 0.1, 0.03])[: size // 2])
    rotary = angles.cos().to(F64), angles.sin().to(F64)
    case = Cache(**LAYOUTS[layout])
    got = case.call(
        rotary_cos=rotary[0],
        rotary_sin=rotary[1],
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
        **TERMS[terms],
    )
    case.assert_right(got, rotary, interleaved, **TERMS[terms])


@pytest.mark.parametrize("pages", [False, True])
def test_cache_lengths_may_be_one_number_or_none(pages: bool) -> None:
    case = Cache((6, 6, 6), pages=pages)
    case.assert_right(case.call(6, causal=True, return_softmax_lse=True), causal=True)
    case = Cache((ROOM,) * 3, new=0, pages=pages)
    case.assert_right(case.call(None, causal=True, return_softmax_lse=True), causal=True)
    case = Cache((ROOM,) * 3, new=0, leftpad=(3, 0, 5))
    case.assert_right(case.call(None, return_softmax_lse=True))


def test_cache_returns_the_output_alone_and_has_no_gradient() -> None:
    case = Cache()
    case.q.requires_grad_()
    output = case.call()
    assert isinstance(output, Tensor)
    assert not output.requires_grad
    assert output.shape == case.q.shape
    assert output.is_contiguous()


def test_cache_behind_the_last_token_may_hold_anything() -> None:
    case = Cache()
    for tensor in (*case.given, *case.dense):
        for b, start in enumerate(case.before):
            tensor[b, start:] = torch.nan
        tensor[len(case.before) :] = torch.nan
    got = case.call(causal=True, return_softmax_lse=True)
    assert all(t.isfinite().all() for t in got)
    case.dense = [t.nan_to_num() for t in case.dense]
    case.given = [t.nan_to_num() for t in case.given]
    case.assert_right(got, causal=True)


def test_cache_positional_arguments() -> None:
    case = Cache()
    angles = torch.rand(ROOM, 2, dtype=F64)
    rotary = angles.cos(), angles.sin()
    lengths = torch.tensor(case.before, dtype=torch.int32)
    where = (lengths, None, None, None)
    got = flash_attn_with_kvcache(
        case.q,
        *case.given,
        *case.new,
        *rotary,
        *where,
        0.3,
        True,
        (4, 0),
        1.5,
        False,
        None,
        1,
        True,
    )
    terms = {"softmax_scale": 0.3, "causal": True, "window_size": (4, 0), "softcap": 1.5}
    case.assert_right(got, rotary, False, **terms)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_read_back_to_the_host(layout: str) -> None:
    """Tensors on ``meta`` have no values to read."""
    case = Cache(**LAYOUTS[layout])
    case.q = case.q.to("meta")
    case.new = [None if t is None else t.to("meta") for t in case.new]
    case.given = [t.to("meta") for t in case.given]
    case.options = {name: t.to("meta") for name, t in case.options.items()}
    angles = torch.empty(ROOM, D // 2, device="meta")
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    output = case.call(lengths, rotary_cos=angles, rotary_sin=angles, causal=True)
    assert output.shape == case.q.shape
    flat = torch.empty(8, H, D, device="meta", dtype=F64)
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    pages = case.given if "block_table" in case.options else (flat, flat)
    found = flash_attn_varlen_func(
        flat, *pages, cu, cu, 5, 5, block_table=case.options.get("block_table")
    )
    assert found.shape == flat.shape


# --------------------------------------------------------------------------------------- verdicts


def test_cudnn_serves_what_ordinary_calls_become(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for a described GPU; the values of what is served are for the GPU to show."""
    verdicts: list[Any] = []

    def ask(explain: Callable[..., Any], last: int) -> Callable[..., Any]:
        def asked(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
            gradient = {} if explain is explain_paged else {"requires_grad": True}
            verdicts.append(explain(*given[:last], **options, **gradient, gpu="h200"))
            return given[0], given[0][..., 0]

        return asked

    monkeypatch.setattr(flash_attn, "cudnn_sdpa", ask(explain, 3))
    monkeypatch.setattr(flash_attn, "cudnn_sdpa_varlen", ask(explain_varlen, 7))
    monkeypatch.setattr(flash_attn, "cudnn_sdpa_paged", ask(explain_paged, 4))

    def half(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta", dtype=torch.bfloat16)

    def whole(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta", dtype=torch.int32)

    kv = half(2, 256, 2, 64), half(2, 256, 2, 64)
    flat = half(300, 2, 64), half(300, 2, 64)
    flash_attn_func(half(2, 100, 8, 64), *kv, causal=True)
    call = (half(200, 8, 64), *flat, whole(3), whole(3), 120, 200)
    flash_attn_varlen_func(*call, causal=True, window_size=(64, -1))
    pages = half(8, 16, 2, 64), half(8, 16, 2, 64)
    flash_attn_with_kvcache(
        half(2, 1, 8, 64), *pages, cache_seqlens=whole(2), block_table=whole(2, 4), causal=True
    )
    assert [(verdict.served, verdict.reasons) for verdict in verdicts] == [(True, ())] * 3


# --------------------------------------------------------------------------------------- refusals


def tensors(*lengths: int) -> list[Tensor]:
    return [randn(B, n, H, D) for n in lengths]


CU = starts(LENGTHS_Q)
TABLE = torch.zeros(B, 3, dtype=torch.int32)
COS = torch.rand(ROOM, 4, dtype=F64)


def cache(**options: Any) -> Any:
    q, k_cache, v_cache = randn(B, 1, H, D), randn(B, ROOM, HK, D), randn(B, ROOM, HK, D)
    return flash_attn_with_kvcache(q, k_cache, v_cache, **options)


def one_new(**options: Any) -> Any:
    new = randn(B, 1, HK, D)
    return cache(**{"k": new, "v": new, **options})


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "dmask": (
        "return_attn_probs cannot be honoured beside dropout_p",
        lambda: flash_attn_func(*tensors(5, 5, 5), 0.1, return_attn_probs=True),
    ),
    "varlen_dmask": (
        "return_attn_probs cannot be honoured beside dropout_p",
        lambda: flash_attn_varlen_qkvpacked_func(
            randn(8, 3, H, D), CU, 4, 0.1, return_attn_probs=True
        ),
    ),
    "shape": ("q must be", lambda: flash_attn_func(randn(5, H, D), *tensors(5, 5))),
    "batch": (
        "one batch size",
        lambda: flash_attn_func(randn(1, 5, H, D), *tensors(5, 5)),
    ),
    "packed_shape": ("qkv must be", lambda: flash_attn_qkvpacked_func(randn(B, 5, 2, H, D))),
    "packed_dims": (
        "kv must be",
        lambda: flash_attn_kvpacked_func(randn(B, 5, H, D), randn(B, 5, H, D)),
    ),
    "slopes": (
        "alibi_slopes must be",
        lambda: flash_attn_func(*tensors(5, 5, 5), alibi_slopes=torch.rand(B)),
    ),
    "window": (
        "window_size must be",
        lambda: flash_attn_func(*tensors(5, 5, 5), window_size=(None, None)),
    ),
    "paged_dropout": (
        "dropout_p must be 0 beside block_table",
        lambda: flash_attn_varlen_func(
            randn(8, H, D), *tensors(4, 4), CU, CU, 4, 4, 0.1, block_table=TABLE
        ),
    ),
    "varlen_shape": (
        "k must be",
        lambda: flash_attn_varlen_func(randn(8, H, D), *tensors(4, 4), CU, CU, 4, 4),
    ),
    "rows_and_pages": (
        "cache_batch_idx must be None beside block_table",
        lambda: cache(cache_batch_idx=torch.arange(B), block_table=TABLE),
    ),
    "leftpad_and_pages": (
        "cache_leftpad must be None beside block_table",
        lambda: cache(cache_leftpad=torch.arange(B), block_table=TABLE),
    ),
    "rows_shape": ("cache_batch_idx must be", lambda: cache(cache_batch_idx=torch.arange(2))),
    "table_shape": ("block_table must be", lambda: cache(block_table=TABLE[:2])),
    "no_room": ("cache_seqlens must be from 0 to 11", lambda: one_new(cache_seqlens=12)),
    "no_lengths": ("cache_seqlens must be given", lambda: one_new()),
    "lengths_shape": (
        "cache_seqlens must be a number or",
        lambda: cache(cache_seqlens=torch.zeros(2, dtype=torch.int32)),
    ),
    "lengths_dtype": (
        "cache_seqlens must be a number or",
        lambda: cache(cache_seqlens=torch.zeros(B)),
    ),
    "key_alone": ("k and v must be given together", lambda: one_new(v=None, cache_seqlens=1)),
    "new_dtype": (
        "k must be .* to go into k_cache",
        lambda: one_new(k=torch.zeros(B, 1, HK, D), cache_seqlens=1),
    ),
    "rows_beyond": (
        "cache_batch_idx must be from 0 to 2, .* for sequence 1, got 3",
        lambda: cache(cache_batch_idx=torch.tensor([0, 3, 1])),
    ),
    "lengths_beyond": (
        "cache_seqlens must be from 0 to 11, .* for sequence 2, got 12",
        lambda: one_new(cache_seqlens=torch.tensor([0, 11, 12])),
    ),
    "lengths_fraction": (
        "cache_seqlens must be a whole number, got 1.5",
        lambda: cache(cache_seqlens=1.5),
    ),
    "leftpad_beyond": (
        "cache_leftpad must be from 0 to 5, .* for sequence 1, got 6",
        lambda: cache(cache_seqlens=5, cache_leftpad=torch.tensor([5, 6, 0])),
    ),
    "page_of_new": (
        "block_table must hold pages from 0 to 2 .*, got 3 for page 1 of sequence 2",
        lambda: one_new(
            cache_seqlens=ROOM,
            block_table=torch.tensor([[0, 1], [1, 1], [2, 3]], dtype=torch.int32),
        ),
    ),
    "table_kind": ("block_table must be a torch.Tensor", lambda: cache(block_table=[[0]] * B)),
    "caches_apart": (
        r"k_cache and v_cache must have the same first two .* \(3, 4, 2, 8\) and \(3, 5, 2, 8\)",
        lambda: flash_attn_with_kvcache(randn(B, 1, H, D), *(randn(B, n, HK, D) for n in (4, 5))),
    ),
    "few_rows": (
        "k_cache must have a row for each",
        lambda: flash_attn_with_kvcache(randn(B, 1, H, D), *(randn(2, 4, H, D) for _ in "kv")),
    ),
    "rotary_alone": (
        "rotary_cos and rotary_sin must be given together, and with k and v",
        lambda: cache(rotary_cos=COS, rotary_sin=COS, cache_seqlens=1),
    ),
    "rotary_half": (
        "rotary_cos and rotary_sin must be given together",
        lambda: one_new(rotary_cos=COS, cache_seqlens=1),
    ),
    "rotary_short": (
        "at least 12 positions",
        lambda: one_new(rotary_cos=COS[:5], rotary_sin=COS[:5], cache_seqlens=1),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(case: str) -> None:
    message, call = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


PACKED = randn(8, H, D), randn(8, HK, D), randn(8, HK, D)
CACHED = randn(B, 1, H, D), randn(B, ROOM, HK, D), randn(B, ROOM, HK, D)
PAGED = (*CACHED, TABLE)
VALID: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dense": (flash_attn_func, {"q": randn(B, 5, H, D), "k": randn(B, 6, HK, D)}),
    "kv": (flash_attn_kvpacked_func, {"q": randn(B, 5, H, D), "kv": randn(B, 6, 2, HK, D)}),
    "qkv": (flash_attn_qkvpacked_func, {"qkv": randn(B, 5, 3, H, D)}),
    "varlen": (
        flash_attn_varlen_func,
        dict(zip(("q", "k", "v", *SIDES), (*PACKED, CU, CU, 4, 4), strict=True)),
    ),
    "varlen_pages": (
        flash_attn_varlen_func,
        dict(
            zip(
                ("q", "k", "v", *SIDES, "block_table"),
                (PACKED[0], *CACHED[1:], CU, CU, 4, 4, TABLE),
                strict=True,
            )
        ),
    ),
    "varlen_kv": (
        flash_attn_varlen_kvpacked_func,
        dict(
            zip(
                ("q", "kv", *SIDES),
                (PACKED[0], randn(8, 2, HK, D), CU, CU, 4, 4),
                strict=True,
            )
        ),
    ),
    "varlen_qkv": (
        flash_attn_varlen_qkvpacked_func,
        {"qkv": randn(8, 3, H, D), "cu_seqlens": CU, "max_seqlen": 4},
    ),
    "cache": (
        flash_attn_with_kvcache,
        {"q": CACHED[0], "k_cache": CACHED[1], "v_cache": CACHED[2]},
    ),
    "cache_pages": (
        flash_attn_with_kvcache,
        {
            "q": CACHED[0],
            "k_cache": CACHED[1],
            "v_cache": CACHED[2],
            "block_table": TABLE,
            "cache_seqlens": torch.full((B,), 4),
        },
    ),
}
VALID["dense"][1]["v"] = VALID["dense"][1]["k"]


def changes(name: str, given: Any) -> list[Any]:
    """What an argument must not be."""
    if name == "qkv":
        return [given.long(), given[..., :2, :, :], given[0], 3]
    if isinstance(given, Tensor) and given.is_floating_point():
        uneven = given[..., :1, :] if name == "q" else given[..., [0, 0, 0], :]  # heads
        others = [given.float(), given.long(), given.to("meta"), given[0], uneven, 3]
        return others if name.startswith("v") else [*others, given[..., :4]]
    if isinstance(given, Tensor):
        fewer = [] if name == "cu_seqlens" else [given[:2]]
        return [given.float(), *fewer, given[None], given.to("meta"), -1 - given, "s"]
    known: dict[str, list[Any]] = {
        "dropout_p": [-0.1, 1.5, "s"],
        "softmax_scale": [float("inf"), float("nan"), "s", 1e39],
        "causal": ["s", 1, None],
        "window_size": [3, (1, 2, 3), (None, None), (True, 1)],
        "softcap": [-1.0, float("nan"), float("inf"), "s"],
        "alibi_slopes": [torch.ones(H - 1), torch.ones(H, device="meta"), CU.new_ones(H), 0.5],
        "deterministic": ["s"],
        "return_attn_probs": ["s", 1],
        "return_softmax_lse": ["s", 1],
        "rotary_interleaved": ["s"],
        "cache_seqlens": [1.5, -1, 99, torch.full((B,), 99), torch.zeros(B, device="meta").int()],
        "cache_batch_idx": [torch.zeros(B), torch.full((B,), -1), 1],
        "cache_leftpad": [torch.zeros(B), torch.full((B,), 99), 1],
    }
    return known.get(name, [-1, 1.5, "s", True] if name.startswith("max_seqlen") else [])


WRONG = [
    pytest.param(case, name, n, id=f"{case}-{name}-{n}")
    for case, (function, valid) in VALID.items()
    for name, parameter in inspect.signature(function).parameters.items()
    for n in range(len(changes(name, valid.get(name, parameter.default))))
]
OURS = {
    name
    for function in (cudnn_sdpa, cudnn_sdpa_varlen, cudnn_sdpa_paged)
    for name in inspect.signature(function).parameters
}


@pytest.mark.parametrize(("case", "name", "n"), WRONG)
def test_errors_name_arguments_of_the_function_that_was_called(
    case: str, name: str, n: int
) -> None:
    function, valid = VALID[case]
    parameters = inspect.signature(function).parameters
    function(**valid)
    wrong = changes(name, valid.get(name, parameters[name].default))[n]
    before = [t.clone() for t in valid.values() if isinstance(t, Tensor)]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        function(**valid | {name: wrong})
    text = re.sub("the (query|key|value) of ", "", str(caught.value))
    words = set(re.findall(r"\w+", text))
    assert words & set(parameters), str(caught.value)
    assert not words & (OURS - set(parameters)), str(caught.value)
    after = [t for t in valid.values() if isinstance(t, Tensor)]
    assert all(map(torch.equal, before, after))


def test_a_cap_of_0_is_none() -> None:
    given = tensors(5, 5, 5)
    assert torch.equal(flash_attn_func(*given, softcap=0.0), flash_attn_func(*given))


@pytest.mark.parametrize("kind", [torch.tensor, np.int64, lambda n: torch.tensor([n])])
def test_the_longest_may_be_a_tensor(kind: Callable[[int], Any]) -> None:
    for case, table in (("varlen", {}), ("varlen_pages", {"block_table": TABLE})):
        function, valid = VALID[case]
        lengths = {"max_seqlen_q": kind(4), "max_seqlen_k": kind(6)}
        assert torch.equal(function(**valid | lengths | table), function(**valid))
    longer = flash_attn_varlen_qkvpacked_func(randn(8, 3, H, D), CU, kind(4), causal=True)
    assert longer.isfinite().all()


def test_pages_have_no_gradient() -> None:
    q, pages = randn(8, H, D, grad=True), randn(9, 4, H, D)
    with pytest.raises(RuntimeError, match="no gradient"):
        flash_attn_varlen_func(q, pages, pages, CU, CU, 4, 4, block_table=TABLE)


# -------------------------------------------------------------------------------------------- gpu


@pytest.fixture
def cudnn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may compute nothing."""

    def refuse(name: str, reasons: tuple[Any, ...]) -> None:
        raise AssertionError(f"{name} fell back: {'; '.join(map(str, reasons))}")

    monkeypatch.setattr(dispatch, "log_fallback", refuse)


def asked(case: Call) -> dict[str, Any]:
    """The options of a call in FlashAttention's words."""
    o = case.options
    names = {"is_causal": "causal", "scale": "softmax_scale", "window": "window_size"}
    kept = ("softcap", "alibi_slopes", "deterministic")
    renamed = {new: o[old] for old, new in names.items() if old in o}
    return renamed | {name: o[name] for name in kept if name in o}


def dense_results(case: Call, *, gradients: bool = True) -> Results:
    """A padded call without lengths through `flash_attn_func`."""
    leaves = [t.detach().transpose(1, 2).contiguous() for t in case.leaves()]
    leaves = [t.requires_grad_(gradients) for t in leaves]
    output, lse, _ = flash_attn_func(*leaves, **asked(case), return_attn_probs=True)
    results = {"output": output.detach().transpose(1, 2), "lse": lse.detach()}
    if gradients:
        assert case.grad_output is not None
        upstream = case.grad_output.transpose(1, 2).contiguous()
        found = torch.autograd.grad(output, leaves, upstream)
        results |= {n: t.transpose(1, 2) for n, t in zip(case.names, found, strict=True)}
    return results


def gpu_case(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    **options: Any,
) -> Call:
    sizes = ((heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1]))
    made = (torch.randn(2, h, s, dim, device="cuda").to(dtype) for h, s in sizes)
    # The definition's diagonal ends in the last key.
    alignment = {"causal_alignment": "bottom_right", "enable_gqa": True}
    return Call(*made, options=alignment | options)


GPU_TERMS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "scale": {"is_causal": True, "scale": 0.3},
    "window": {"is_causal": True, "window": (40, 0)},
    "two_sided": {"window": (40, 30)},
    "softcap": {"is_causal": True, "softcap": 5.0},
    "deterministic": {"is_causal": True, "deterministic": True},
}


@pytest.mark.gpu
@pytest.mark.usefixtures("cudnn_only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("terms", GPU_TERMS)
@pytest.mark.parametrize("lengths", [(256, 256), (100, 333), (1, 200)])
def test_gpu_dense(lengths: tuple[int, int], terms: str, dtype: torch.dtype) -> None:
    for heads, dim in (((4, 4), 64), ((8, 2), 128)):
        case = gpu_case(heads, lengths, dim, dtype, **GPU_TERMS[terms])
        assert_right(case, results=dense_results)
        assert_right(case, results=dense_results, gradients=False)


@pytest.mark.gpu
@pytest.mark.usefixtures("cudnn_only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_alibi(dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.5, 0.1, 0.03, 0.01], device="cuda")
    case = gpu_case((4, 4), (128, 200), 64, dtype, is_causal=True, alibi_slopes=slopes)
    assert_right(case, results=dense_results)
    both = [t.detach().transpose(1, 2).contiguous() for t in case.leaves()]
    by_row = torch.stack([slopes, slopes / 2])
    got = flash_attn_func(*both, causal=True, alibi_slopes=by_row)
    for b in range(2):
        alone = flash_attn_func(*(t[b : b + 1] for t in both), causal=True, alibi_slopes=by_row[b])
        assert torch.equal(got[b : b + 1], alone)


def packed_results(case: Call, *, gradients: bool = True) -> Results:
    """A padded call of equal lengths through `flash_attn_varlen_func`."""
    flat = [t.detach().transpose(1, 2).flatten(0, 1).contiguous() for t in case.leaves()]
    flat = [t.requires_grad_(gradients) for t in flat]
    sizes = (case.query.shape[2], case.key.shape[2])
    cu = [torch.arange(3, device="cuda", dtype=torch.int32) * size for size in sizes]
    output, lse, _ = flash_attn_varlen_func(
        *flat, *cu, *sizes, **asked(case), return_attn_probs=True
    )

    def unpacked(t: Tensor, size: int) -> Tensor:
        return t.view(2, size, *t.shape[1:]).transpose(1, 2)

    results = {
        "output": unpacked(output.detach(), sizes[0]),
        "lse": unpacked(lse.detach().mT, sizes[0]),
    }
    if gradients:
        assert case.grad_output is not None
        upstream = case.grad_output.transpose(1, 2).flatten(0, 1)
        found = torch.autograd.grad(output, flat, upstream)
        lengths = (sizes[0], sizes[1], sizes[1])
        for name, gradient, size in zip(case.names, found, lengths, strict=True):
            results[name] = unpacked(gradient, size)
    return results


@pytest.mark.gpu
@pytest.mark.usefixtures("cudnn_only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("terms", [name for name in GPU_TERMS if name != "softcap"])
@pytest.mark.parametrize("lengths", [(256, 256), (100, 333)])
def test_gpu_varlen(lengths: tuple[int, int], terms: str, dtype: torch.dtype) -> None:
    for heads, dim in (((4, 4), 64), ((8, 2), 128)):
        case = gpu_case(heads, lengths, dim, dtype, **GPU_TERMS[terms])
        assert_right(case, results=packed_results)
        assert_right(case, results=packed_results, gradients=False)


def cached_results(case: Call, *, gradients: bool = False, layout: str, step: int = 0) -> Results:
    """A padded call with lengths of keys through `flash_attn_with_kvcache`.

    The last ``step`` keys are the new ones. Rows of another order, pages, or neither.
    """
    assert not gradients
    lengths = case.options["seq_lens_kv"]
    before = lengths - step
    q, k, v = (t.detach().transpose(1, 2) for t in (case.query, case.key, case.value))
    index = before[:, None].long() + torch.arange(step, device="cuda")
    batch = torch.arange(2, device="cuda")[:, None]
    new = [t[batch, index] for t in (k, v)] if step else [None, None]
    caches = [t.clone().contiguous() for t in (k, v)]
    for cache_ in caches:
        beyond = torch.arange(cache_.shape[1], device="cuda") >= before[:, None]
        cache_[beyond] = 0 if layout == "pages" else torch.nan
    options = asked(case)
    if layout == "rows":
        caches = [t.flip(0).contiguous() for t in caches]
        options["cache_batch_idx"] = torch.tensor([1, 0], device="cuda", dtype=torch.int32)
    if layout == "pages":
        caches = [t.unflatten(1, (-1, 32)).flatten(0, 1) for t in caches]
        count = caches[0].shape[0] // 2
        table = torch.arange(2 * count, device="cuda", dtype=torch.int32)
        options["block_table"] = table.view(2, count)
    output, lse = flash_attn_with_kvcache(
        q.contiguous(), *caches, *new, cache_seqlens=before, return_softmax_lse=True, **options
    )
    return {"output": output.transpose(1, 2), "lse": lse}


@pytest.mark.gpu
@pytest.mark.usefixtures("cudnn_only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["dense", "rows", "pages"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("terms", ["full", "causal", "window"])
def test_gpu_cache(terms: str, queries: int, layout: str, dtype: torch.dtype) -> None:
    lengths = torch.tensor([200, 77], device="cuda", dtype=torch.int32)
    for step in (0, queries):
        case = gpu_case((8, 2), (queries, 256), 64, dtype, **GPU_TERMS[terms])
        case.options["seq_lens_kv"] = lengths
        assert_right(case, results=cached_results, gradients=False, layout=layout, step=step)


@pytest.mark.gpu
@pytest.mark.usefixtures("cudnn_only")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_gpu_cache_makes_no_host_wait_and_replays_in_a_graph() -> None:
    q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    new = [torch.randn(2, 1, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    caches = [torch.zeros(2, 256, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    lengths = torch.tensor([3, 100], device="cuda", dtype=torch.int32)

    def step() -> Tensor:
        output = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, causal=True)
        assert isinstance(output, Tensor)
        return output

    step()  # makes the plan
    with no_waits():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    lengths.copy_(torch.tensor([4, 101]))
    graph.replay()
    assert torch.equal(output, step())
    for cache_, token in zip(caches, new, strict=True):
        assert torch.equal(cache_[0, 4], token[0, 0])
        assert torch.equal(cache_[1, 101], token[1, 0])
