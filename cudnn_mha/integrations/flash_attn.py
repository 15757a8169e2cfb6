"""FlashAttention's functions on cuDNN: change the import, and a script runs on this package.

``from flash_attn import flash_attn_func`` becomes ``from cudnn_mha.integrations.flash_attn import
flash_attn_func``. Names, positional order, defaults, layouts and results are those of
FlashAttention 2 (`flash_attn/flash_attn_interface.py`, 2.8); its package need not be installed.
Tensors are ``(B, S, H, D)``, or packed ``(tokens, H, D)``; they reach cuDNN as views.

What differs, each time to the better-defined side:

* the log-sum-exp of a row that attends to nothing is -inf (its kernels write +inf), and a gradient
  that comes through the log-sum-exp is not dropped;
* ``dropout_p > 0`` with ``return_attn_probs`` raises, since cuDNN returns no dropout pattern, and
  so does a negative ``softcap``, which its kernels take for none;
* lengths, page numbers and rows that are out of bounds raise where they lie on the CPU; on a device
  none of them is read back;
* float32, the CPU, and calls that cuDNN does not serve are computed by PyTorch; the logger
  ``cudnn_mha`` says why, once for each distinct cause.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cudnn_mha.functional import cudnn_sdpa
from cudnn_mha.functional_layouts import cudnn_sdpa_paged, cudnn_sdpa_varlen
from cudnn_mha.integrations import kv_cache
from cudnn_mha.integrations.naming import in_words
from cudnn_mha.routes import require_fit
from cudnn_mha.sequences import on_host, require_lengths, require_pages, require_starts

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Any
"""A tensor, or a tuple of them where more is asked for; a union would trouble every caller."""

_DENSE = {
    "query": "q",
    "key": "k",
    "value": "v",
    "scale": "softmax_scale",
    "is_causal": "causal",
    "window": "window_size",
    "return_lse": "return_attn_probs",
}
"""What FlashAttention calls the arguments of the functions that compute the call here."""

_VARLEN = _DENSE | {
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_kv": "max_seqlen_k",
    "key_pages": "k",
    "value_pages": "v",
    "seq_lens_q": "cu_seqlens_q",
    "seq_lens_kv": "cu_seqlens_k",
}

_CACHE = _DENSE | {
    "key": "k_cache",
    "value": "v_cache",
    "key_pages": "k_cache",
    "value_pages": "v_cache",
    "seq_lens_kv": "cache_seqlens",
    "return_lse": "return_softmax_lse",
}

# What holds of a part of a packed projection.
_OF_KV = {"k": "the key of kv", "v": "the value of kv"}
_OF_QKV = {"q": "the query of qkv", "k": "the key of qkv", "v": "the value of qkv"}
_ONE_SIDE = {
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}


@in_words(_DENSE)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of a batch of sequences of one length.

    With ``d = i - j + Sk - Sq`` (the diagonal ends in the last key) query i sees key j where
    ``-right <= d <= left``.

    Args:
        q: ``(B, Sq, Hq, D)``.
        k, v: ``(B, Sk, Hk, D)``; Hk divides Hq: query head h uses head ``h // (Hq // Hk)``.
        dropout_p: probability that an attention weight is dropped; 0 during evaluation.
        softmax_scale: factor on the scores; default ``1/sqrt(D)``.
        causal: right is 0.
        window_size: ``(left, right)``; negative for no bound.
        softcap: above 0, turns scores s into ``softcap * tanh(s / softcap)``; 0 leaves them.
        alibi_slopes: ``(Hq,)`` or ``(B, Hq)``; adds ``-slope * |d|`` to the scores. The latter
            runs as one call for each sequence.
        deterministic: gradients are bit-equal on every run; False follows
            ``torch.use_deterministic_algorithms``.
        return_attn_probs: also return log-sum-exp and S_dmask.

    Returns:
        ``(B, Sq, Hq, D)``; with ``return_attn_probs`` a triple: that, the log-sum-exp
        ``(B, Hq, Sq)``, float32, natural logarithm, and S_dmask, empty as FlashAttention's without
        dropout.

    Raises:
        ValueError, TypeError, RuntimeError: an argument that means nothing or cannot be honoured;
            the message names it and says what to do.
    """
    _require_shapes(4, "(B, S, H, D)", q=q, k=k, v=v)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"q, k and v must be of one batch size, got {q.shape[0]}, {k.shape[0]}, {v.shape[0]}"
        )
    _require_heads(q, k=k, v=v)
    _require_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    _require_no_dmask(dropout_p, return_attn_probs)
    _require_slopes(alibi_slopes, q.shape[0], q.shape[2])
    options = {
        "dropout_p": dropout_p,
        "scale": softmax_scale,
        "deterministic": deterministic or None,
        "return_lse": return_attn_probs,
        **_terms(
            causal,
            window_size,
            softcap,
            alibi_slopes,
            square=q.shape[1] == k.shape[1],
            single=q.shape[1] == 1,
        ),
    }
    return _triple(*_each(_dense, alibi_slopes, options, q, k, v, None))


@in_words(_OF_KV)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with key and value in one tensor, ``(B, Sk, 2, Hk, D)``."""
    k, v = _unpacked("kv", kv, 2, 5)
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    return flash_attn_func(q, k, v, *rest, deterministic, return_attn_probs)


@in_words(_OF_QKV)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with query, key and value in one tensor, ``(B, S, 3, H, D)``."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    return flash_attn_func(q, k, v, *rest, deterministic, return_attn_probs)


@in_words(_VARLEN)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention within each of several sequences that lie one after another.

    Args:
        q: ``(Tq, Hq, D)``.
        k, v: ``(Tk, Hk, D)``, or ``(pages, page size, Hk, D)`` with a ``block_table``; slots of a
            page behind the last key must hold finite numbers.
        cu_seqlens_q, cu_seqlens_k: ``(B + 1,)`` int32 or int64: sequence b has the tokens
            ``cu_seqlens[b]`` up to ``cu_seqlens[b + 1]``; with pages the differences are the
            lengths.
        max_seqlen_q, max_seqlen_k: at least the longest sequence. Tensors of one whole number are
            taken too and read on the host, which waits for a device that they are on.
        block_table: ``(B, M)`` the pages of each sequence in order; forward only, no dropout.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes: as for
            `flash_attn_func`, within each sequence. Slopes ``(B, Hq)`` take B calls.
        deterministic, return_attn_probs: as for `flash_attn_func`.

    Returns:
        ``(Tq, Hq, D)``; with ``return_attn_probs`` a triple with the log-sum-exp ``(Hq, Tq)``.

    Raises:
        ValueError, TypeError, RuntimeError: as `flash_attn_func`.
    """
    _require_shapes(3, "(tokens, H, D)", q=q)
    kind = "(tokens, H, D)" if block_table is None else "pages, (pages, page size, H, D)"
    _require_shapes(3 if block_table is None else 4, kind, k=k, v=v)
    _require_heads(q, k=k, v=v)
    _require_starts(q, cu_seqlens_q, cu_seqlens_k)
    longest = (
        _longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q),
        _longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k),
    )
    _require_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    _require_no_dmask(dropout_p, return_attn_probs)
    _require_slopes(alibi_slopes, cu_seqlens_q.shape[0] - 1, q.shape[1])
    options = {
        "scale": softmax_scale,
        "return_lse": return_attn_probs,
        # With the same starts on both sides the two corners of each diagonal are one.
        **_terms(causal, window_size, softcap, alibi_slopes, square=cu_seqlens_q is cu_seqlens_k),
    }
    if block_table is not None:
        if dropout_p:
            raise ValueError(
                f"dropout_p must be 0 beside block_table, got {dropout_p}: attention to pages is "
                "for inference; gather the pages into k and v to train on them"
            )
        _require_table(block_table, q, cu_seqlens_q.shape[0] - 1)
        require_starts("cu_seqlens_q", cu_seqlens_q, q.shape[0])
        lengths = cu_seqlens_k.diff()
        room = k.shape[1] * block_table.shape[1]
        require_lengths("the length by cu_seqlens_k", lengths, room, "what its pages hold")
        return _triple(
            *_packed_to_pages(
                q, k, v, cu_seqlens_q, longest[0], block_table, lengths, alibi_slopes, options
            )
        )
    options |= {"dropout_p": dropout_p, "deterministic": deterministic or None}

    def attend(starts_q: Tensor, starts_k: Tensor, slopes: Tensor | None) -> Any:
        starts = starts_q, starts_k
        return _pair(cudnn_sdpa_varlen(q, k, v, *starts, *longest, alibi_slopes=slopes, **options))

    if alibi_slopes is None or alibi_slopes.dim() == 1:
        return _triple(*attend(cu_seqlens_q, cu_seqlens_k, alibi_slopes))
    # Each call leaves the tokens of other sequences zeros, and their log-sum-exp -inf.
    parts = [
        attend(cu_seqlens_q[b : b + 2], cu_seqlens_k[b : b + 2], slopes)
        for b, slopes in enumerate(alibi_slopes)
    ]
    output = torch.stack([part[0] for part in parts]).sum(0)
    if not return_attn_probs:
        return output
    return _triple(output, torch.stack([part[1] for part in parts]).amax(0))


@in_words(_OF_KV)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with key and value in one tensor, ``(Tk, 2, Hk, D)``."""
    k, v = _unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


@in_words(_OF_QKV | _ONE_SIDE)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with query, key and value in one tensor, ``(T, 3, H, D)``."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


@in_words(_CACHE)
@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention to a cache of keys and values, to which new ones may be appended; no gradient.

    The last query belongs to the last key, new ones included, as in `flash_attn_func`. No length
    is read back to the host, so one plan and one captured CUDA graph serve every step.

    Args:
        q: ``(B, Sq, Hq, D)``.
        k_cache, v_cache: ``(B', Sc, Hk, D)`` with B' at least B, or with a ``block_table``
            ``(pages, page size, Hk, D)``, of which cuDNN takes page sizes that are powers of two;
            slots of a page behind the last key must hold finite numbers. Other caches may hold
            anything there.
        k, v: ``(B, Sn, Hk, D)``: written into the caches in place behind their first
            ``cache_seqlens`` tokens, for which there must be room, and attended to.
        rotary_cos, rotary_sin: ``(positions, R / 2)``: turns ``k``, which must be given, at
            positions ``cache_seqlens + i``, and ``q`` likewise if ``causal`` or a window is asked
            for, else all of it at ``cache_seqlens``. Dimensions behind the first R stay.
        cache_seqlens: tokens in the cache before the call: a number, or ``(B,)`` int32 or int64
            on the device. None: the cache is full.
        cache_batch_idx: ``(B,)`` the row of the cache of each sequence; copies these rows. Not
            with pages, whose table says the same.
        cache_leftpad: ``(B,)`` at which token of its row each sequence begins (``cache_seqlens``
            counts from the row's start); copies the rows. Not with pages.
        block_table: ``(B, M)`` the pages of each sequence in order.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as for `flash_attn_func`.
        rotary_interleaved: dimensions 2i and 2i + 1 turn together, else i and i + R / 2.
        num_splits: accepted for the sake of the signature: cuDNN's kernels choose how they divide
            the keys, and the result is the same up to rounding.
        return_softmax_lse: also return the log-sum-exp.

    Returns:
        ``(B, Sq, Hq, D)``; with ``return_softmax_lse`` the pair of it and ``(B, Hq, Sq)``.

    Raises:
        ValueError, TypeError, RuntimeError: as `flash_attn_func`.
    """
    del num_splits
    given = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    _validate_cache(q, k_cache, v_cache, k, v, block_table, given)
    _require_flags(
        causal=causal,
        rotary_interleaved=rotary_interleaved,
        return_softmax_lse=return_softmax_lse,
    )
    _require_slopes(alibi_slopes, q.shape[0], q.shape[2])
    batch, queries = q.shape[:2]
    options = {
        "scale": softmax_scale,
        "return_lse": return_softmax_lse,
        **_terms(causal, window_size, softcap, alibi_slopes, square=False, single=queries == 1),
    }
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    lengths = _cache_lengths(cache_seqlens, k, room, q)
    whole = lengths if k is None else lengths + k.shape[1]
    if block_table is not None:
        require_pages("block_table", block_table, whole, k_cache.shape[1], k_cache.shape[0])
    if cache_leftpad is not None and on_host(whole):
        require_lengths("cache_leftpad", cache_leftpad, whole.tolist(), "the tokens in the cache")
    if rotary_cos is not None or rotary_sin is not None:
        k_new, tables = _validate_rotary(k, rotary_cos, rotary_sin, q.shape[3], room)
        moving = causal or window_size[0] >= 0 or window_size[1] >= 0
        steps = torch.arange(queries, device=q.device) * moving
        q = kv_cache.rotated(q, *tables, lengths[:, None] + steps, rotary_interleaved)
        steps = torch.arange(k_new.shape[1], device=q.device)
        k = kv_cache.rotated(k_new, *tables, lengths[:, None] + steps, rotary_interleaved)
    if k is not None and v is not None:
        places = lengths[:, None] + torch.arange(k.shape[1], device=q.device)
        for cache, new in ((k_cache, k), (v_cache, v)):
            kv_cache.append(cache, new, places, cache_batch_idx, block_table)
    lengths = whole if cache_leftpad is None else whole - cache_leftpad
    if block_table is not None:

        def attend(rows: Tensor, table: Tensor, lengths: Tensor, **options: Any) -> Any:
            return _paged(rows, k_cache, v_cache, table, lengths, **options)

        output, lse = _each(attend, alibi_slopes, options, q, block_table, lengths)
    else:
        keys, values = (
            kv_cache.own_rows(cache, batch, cache_batch_idx, cache_leftpad)
            for cache in (k_cache, v_cache)
        )
        full = cache_seqlens is None and cache_leftpad is None
        own = None if full else lengths
        output, lse = _each(_dense, alibi_slopes, options, q, keys, values, own)
    return output if lse is None else (output, lse)


# ------------------------------------------------------------------------------------------ calls


def _dense(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """A batch ``(B, S, H, D)``, its layout changed by views."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    found = cudnn_sdpa(q, k, v, enable_gqa=True, seq_lens_kv=lengths, **options)
    output, lse = _pair(found)
    return output.transpose(1, 2), lse


def _paged(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    q = q.transpose(1, 2)
    found = cudnn_sdpa_paged(q, k, v, table, lengths, page_layout="NHD", **options)
    output, lse = _pair(found)
    return output.transpose(1, 2), lse


def _packed_to_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    block_table: Tensor,
    lengths: Tensor,
    slopes: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Packed queries to pages: padded to a batch on the way, as pages are attended to by batches.

    Where no sequence has a token, output is 0 and the log-sum-exp -inf.
    """
    tokens = q.shape[0]
    index = torch.arange(min(longest, tokens), device=q.device)
    own = starts.diff()
    places = starts[:-1, None] + index
    real = index < own[:, None]
    padded = q[places.clamp(max=tokens - 1)]

    def attend(rows: Tensor, own: Tensor, table: Tensor, lengths: Tensor, **options: Any) -> Any:
        return _paged(rows, k, v, table, lengths, seq_lens_q=own, **options)

    output, lse = _each(attend, slopes, options, padded, own, block_table, lengths)
    goal = torch.where(real, places, tokens).flatten()  # padding goes to a row behind the last

    def packed(rows: Tensor, rest: float) -> Tensor:
        rows = rows.flatten(0, 1)
        return rows.new_full((tokens + 1, *rows.shape[1:]), rest).index_copy(0, goal, rows)[:-1]

    return packed(output, 0.0), None if lse is None else packed(lse.mT, -torch.inf).mT


def _each(
    call: Callable[..., tuple[Tensor, Tensor | None]],
    slopes: Tensor | None,
    options: dict[str, Any],
    *tensors: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """A call of a batch; slopes ``(B, H)`` make it one call for each sequence."""
    if slopes is None or slopes.dim() == 1:
        return call(*tensors, alibi_slopes=slopes, **options)
    outputs, lses = [], []
    for b, own in enumerate(slopes):
        rows = (None if t is None else t[b : b + 1] for t in tensors)
        output, lse = call(*rows, alibi_slopes=own, **options)
        outputs.append(output)
        lses += [] if lse is None else [lse]
    return torch.cat(outputs), torch.cat(lses) if lses else None


def _terms(
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    *,
    square: bool,
    single: bool = False,
) -> dict[str, Any]:
    """What a query sees, as `cudnn_sdpa` says it; the shorter way where PyTorch can say it too.

    Args:
        causal, window_size, softcap, alibi_slopes: the caller's.
        square: there are as many keys as queries: top left and bottom right are one diagonal.
        single: there is one query, the last, which has no key after it.
    """
    two = isinstance(window_size, tuple | list) and len(window_size) == 2
    if not two or not all(isinstance(n, int) and not isinstance(n, bool) for n in window_size):
        raise TypeError(
            "window_size must be (left, right), two whole numbers, -1 for no bound; got "
            f"{window_size!r}"
        )
    left, right = (max(n, -1) for n in window_size)
    if causal or right == 0:
        causal, right = not single, -1
    window = None if (left, right) == (-1, -1) else (left, right)
    diagonal = causal or window is not None or alibi_slopes is not None
    return {
        "is_causal": causal,
        "window": window,
        "causal_alignment": "bottom_right" if diagonal and not square else "top_left",
        "softcap": softcap or None,
    }


# ---------------------------------------------------------------------------------------- results


def _pair(found: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    return (found, None) if isinstance(found, Tensor) else found


def _triple(output: Tensor, lse: Tensor | None) -> Result:
    """What ``return_attn_probs`` asks for, S_dmask empty, or the output alone."""
    return output if lse is None else (output, lse, output.new_empty(0))


# -------------------------------------------------------------------------------------- arguments


def _unpacked(name: str, packed: Tensor, count: int, ndim: int) -> tuple[Tensor, ...]:
    shape = f"(B, S, {count}, H, D)" if ndim == 5 else f"(tokens, {count}, H, D)"
    _require_shapes(ndim, shape, **{name: packed})
    if packed.shape[-3] != count:
        raise ValueError(f"{name} must be {shape}, got {tuple(packed.shape)}")
    return packed.unbind(-3)


def _require_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")


def _require_shapes(ndim: int, shape: str, **tensors: Tensor) -> None:
    _require_tensors(**tensors)
    for name, tensor in tensors.items():
        if tensor.dim() != ndim:
            raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}")


def _require_flags(**flags: object) -> None:
    for name, given in flags.items():
        if not isinstance(given, bool):
            raise TypeError(f"{name} must be True or False, got {given!r}")


def _require_heads(q: Tensor, **tensors: Tensor) -> None:
    """Raises where heads of key or value, in the last dimension but one, are in no groups of q."""
    for name, tensor in tensors.items():
        if tensor.shape[-2] == 0 or q.shape[-2] % tensor.shape[-2]:
            raise ValueError(
                f"the heads of {name} must divide those of q, got {tensor.shape[-2]} and "
                f"{q.shape[-2]}"
            )


def _require_starts(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    _require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    shape = tuple(cu_seqlens_q.shape)
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"cu_seqlens_q must be of shape (B + 1,), got {shape}")
    require_fit("cu_seqlens_q", cu_seqlens_q, shape, q, whole=True)
    require_fit("cu_seqlens_k", cu_seqlens_k, shape, q, whole=True)


def _whole(name: str, given: object) -> int:
    """A whole number of any kind; that of a tensor is read on the host."""
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {given!r}") from None


def _longest(name: str, given: int | Tensor, starts: Tensor) -> int:
    """How long the longest sequence is at most."""
    number = _whole(name, given)
    least = int(starts.diff().amax()) if on_host(starts) and starts.numel() > 1 else 0
    if number < least:
        raise ValueError(f"{name} must be at least {least}, the longest sequence, got {number}")
    return number


def _require_table(block_table: Tensor, q: Tensor, batch: int) -> None:
    _require_tensors(block_table=block_table)
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table must be ({batch}, M), got {tuple(block_table.shape)}")
    require_fit("block_table", block_table, tuple(block_table.shape), q, whole=True)


def _require_no_dmask(dropout_p: float, return_attn_probs: bool) -> None:
    if return_attn_probs and dropout_p:
        raise ValueError(
            f"return_attn_probs cannot be honoured beside dropout_p={dropout_p}: cuDNN does not "
            "return which weights it dropped; ask for it without dropout, or leave it out"
        )


def _require_slopes(slopes: Tensor | None, batch: int, heads: int) -> None:
    if slopes is None:
        return
    _require_tensors(alibi_slopes=slopes)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes must be ({heads},) or ({batch}, {heads}), one slope for each head or "
            f"for each sequence and head, got {tuple(slopes.shape)}"
        )


def _validate_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    block_table: Tensor | None,
    rows: dict[str, Tensor | None],
) -> None:
    """Raises for caches and new tokens that do not fit; the message names the argument."""
    _require_shapes(4, "(B, Sq, H, D)", q=q)
    _require_shapes(4, "(B, Sc, H, D) or pages", k_cache=k_cache, v_cache=v_cache)
    _require_heads(q, k_cache=k_cache, v_cache=v_cache)
    if k_cache.shape[:2] != v_cache.shape[:2]:
        raise ValueError(
            "k_cache and v_cache must have the same first two dimensions, got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if q.shape[3] != k_cache.shape[3]:
        raise ValueError(
            "q and k_cache must have the same head dimension, got "
            f"{q.shape[3]} and {k_cache.shape[3]}"
        )
    batch = q.shape[0]
    for name, tensor in rows.items():
        if tensor is None:
            continue
        if block_table is not None:
            raise ValueError(f"{name} must be None beside block_table; let the table say it")
        _require_tensors(**{name: tensor})
        require_fit(name, tensor, (batch,), q, whole=True)
    index = rows["cache_batch_idx"]
    if index is not None:
        most = k_cache.shape[0] - 1
        require_lengths("cache_batch_idx", index, most, "the last row of k_cache")
    if block_table is None and rows["cache_batch_idx"] is None and k_cache.shape[0] < batch:
        raise ValueError(
            f"k_cache must have a row for each of the {batch} sequences of q, got "
            f"{k_cache.shape[0]}; cache_batch_idx says which rows are whose"
        )
    if block_table is not None:
        _require_table(block_table, q, batch)
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, or neither")
    if k is None or v is None:
        return
    _require_shapes(4, "(B, Sn, H, D)", k=k, v=v)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (batch, k.shape[1], *cache.shape[2:])
        if new.shape != expected or new.dtype != cache.dtype:
            raise ValueError(
                f"{name} must be {expected} of {cache.dtype} to go into {name}_cache, got "
                f"{tuple(new.shape)} of {new.dtype}"
            )


def _cache_lengths(given: int | Tensor | None, k: Tensor | None, room: int, q: Tensor) -> Tensor:
    """How many tokens of each sequence are in the cache, ``(B,)`` int64; checked on the host."""
    new = 0 if k is None else k.shape[1]
    if given is None:
        if k is not None:
            raise ValueError("cache_seqlens must be given with k and v: it says where they go")
        given = room
    if isinstance(given, Tensor):
        if given.shape != (q.shape[0],) or given.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"cache_seqlens must be a number or ({q.shape[0]},) int32 or int64, got "
                f"{tuple(given.shape)} {given.dtype}"
            )
        require_fit("cache_seqlens", given, (q.shape[0],), q, whole=True)
        what = f"the cache's {room} tokens less the {new} new ones"
        require_lengths("cache_seqlens", given, room - new, what)
        return given.long()
    given = _whole("cache_seqlens", given)
    if not 0 <= given <= room - new:
        raise ValueError(
            f"cache_seqlens must be from 0 to {room - new}, the cache's {room} tokens less the "
            f"{new} new ones, got {given}; make the cache longer"
        )
    return torch.full((q.shape[0],), given, dtype=torch.int64, device=q.device)


def _validate_rotary(
    k: Tensor | None, cos: Tensor | None, sin: Tensor | None, dim: int, room: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    if cos is None or sin is None or k is None:
        raise ValueError(
            "rotary_cos and rotary_sin must be given together, and with k and v, the tokens that "
            "they turn"
        )
    _require_shapes(2, "(positions, R / 2)", rotary_cos=cos, rotary_sin=sin)
    if cos.shape != sin.shape or 2 * cos.shape[1] > dim or cos.shape[0] < room:
        raise ValueError(
            f"rotary_cos and rotary_sin must both be (positions, R / 2) with at least {room} "
            f"positions, all that the cache has, and R at most the head dimension {dim}; got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    return k, (cos, sin)
