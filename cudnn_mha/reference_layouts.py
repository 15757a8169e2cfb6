"""The reference for sequences that lie packed or in pages, and for keys that come in parts.

The second half of the oracle: everything is brought into the padded form that
`reference.attention` takes. It shares no code with the rest of the package either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cudnn_mha.reference import attention


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    bottom_right: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    compute_dtype: torch.dtype | None = None,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention within each of several sequences that lie one after another.

    Sequence ``b`` has the slot of tokens ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]`` (exclusive).
    Tokens of no sequence take no part, NaN or not: zeros in the output and in all gradients, -inf
    in the LSE.

    Args:
        query: ``(Tq, Hq, Dqk)``.
        key: ``(Tkv, Hk, Dqk)``; heads as in `attention`.
        value: ``(Tkv, Hv, Dv)``.
        cu_seqlens_q, cu_seqlens_kv: ``(B + 1,)`` integer: where slots start and stop.
        seq_lens_q, seq_lens_kv: ``(B,)`` integer: only so many first tokens of each slot belong
            to the sequence, at most as many as it has; all by default.
        max_seqlen_q, max_seqlen_kv: at least the longest length. Computed where not given, which
            waits for the device.
        dropout_p, is_causal, scale, bottom_right, window, softcap, alibi_slopes, sinks,
            compute_dtype: as in `attention`.
        dropout_mask: boolean, broadcastable to ``(B, Hq, max_seqlen_q, max_seqlen_kv)``, row and
            key counted within their sequence; True = keep.

    Returns:
        The output ``(Tq, Hq, Dv)`` and the LSE ``(Hq, Tq)``, in the dtypes of `attention`.

    Raises:
        ValueError: for arguments that do not fit together.
    """
    _check_packed(query, key, value, cu_seqlens_q, cu_seqlens_kv)
    for name, lens in (("seq_lens_q", seq_lens_q), ("seq_lens_kv", seq_lens_kv)):
        if lens is not None:
            _check_lengths(name, lens, cu_seqlens_q.numel() - 1)
    lens_q = cu_seqlens_q.diff() if seq_lens_q is None else seq_lens_q
    lens_kv = cu_seqlens_kv.diff() if seq_lens_kv is None else seq_lens_kv
    places_q = _places(cu_seqlens_q, lens_q, max_seqlen_q, query.size(0))
    places_kv = _places(cu_seqlens_kv, lens_kv, max_seqlen_kv, key.size(0))
    output, lse = attention(
        _taken(query, places_q).transpose(1, 2),
        _taken(key, places_kv).transpose(1, 2),
        _taken(value, places_kv).transpose(1, 2),
        None,
        dropout_p,
        is_causal,
        scale,
        seq_lens_q=lens_q,
        seq_lens_kv=lens_kv,
        bottom_right=bottom_right,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        compute_dtype=compute_dtype,
        dropout_mask=dropout_mask,
    )
    return (
        _put_back(output.transpose(1, 2), places_q, query.size(0), 0.0),
        _put_back(lse.transpose(1, 2), places_q, query.size(0), -math.inf).T.contiguous(),
    )


def paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    bottom_right: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over keys and values that lie in pages, as a serving cache keeps them.

    Key ``j`` of sequence ``b`` is row ``j % P`` of page ``block_table[b, j // P]``, as in Kwon et
    al., "PagedAttention" (2023). Entries of the table past a sequence's last page are not read,
    and may be any number.

    Args:
        query: ``(B, Hq, Sq, Dqk)``.
        key_pages: ``(N, Hk, P, Dqk)``; heads as in `attention`.
        value_pages: ``(N, Hv, P, Dv)``.
        block_table: ``(B, M)`` integer: pages of each sequence, in order.
        seq_lens_kv: ``(B,)`` integer: real lengths, from 0 to ``M * P``.
        seq_lens_q, dropout_p, is_causal, scale, bottom_right, window, softcap, alibi_slopes,
            sinks, compute_dtype: as in `attention`, where a sequence has ``M * P`` keys.
        dropout_mask: boolean, broadcastable to ``(B, Hq, Sq, M * P)``; True = keep.

    Returns:
        The output ``(B, Hq, Sq, Dv)`` and the LSE ``(B, Hq, Sq)``, as `attention`.

    Raises:
        ValueError: for arguments that do not fit together.
    """
    _check_pages(query, key_pages, value_pages, block_table, seq_lens_kv)
    pages, size = key_pages.size(0), key_pages.size(2)
    starts = torch.arange(block_table.size(1), device=block_table.device) * size
    places = torch.where(starts < seq_lens_kv[:, None], block_table.long(), pages)
    key, value = (_taken(t, places).transpose(1, 2).flatten(2, 3) for t in (key_pages, value_pages))
    return attention(
        query,
        key,
        value,
        None,
        dropout_p,
        is_causal,
        scale,
        seq_lens_q=seq_lens_q,
        seq_lens_kv=seq_lens_kv,
        bottom_right=bottom_right,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        compute_dtype=compute_dtype,
        dropout_mask=dropout_mask,
    )


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over disjoint parts of them.

    With ``out_k`` and ``lse_k`` those of part ``k`` (Dao et al., "Flash-Decoding", 2023)::

        lse = log(sum_k exp(lse_k))
        out = sum_k exp(lse_k - lse) * out_k

    Where an LSE is -inf its part had no key, and its output is not read, NaN or not. A row that
    no part has a key for gives zeros, -inf, and zero gradients. A sink must be in one part only.
    Autograd differentiates both results.

    Args:
        outputs: one or more, each ``(..., S, Dv)`` floating point.
        lses: as many, each ``(..., S)`` floating point.

    Returns:
        The output ``(..., S, Dv)`` and the LSE ``(..., S)``, in float64 if one of the inputs is,
        else in float32, which is also the dtype of all arithmetic.

    Raises:
        ValueError, TypeError: for what are no tensors, or do not fit together.
    """
    _check_parts(outputs, lses)
    wide = any(t.dtype == torch.float64 for t in (*outputs, *lses))
    dtype = torch.float64 if wide else torch.float32
    parts = torch.stack([lse.to(dtype) for lse in lses])
    none = parts == -math.inf
    peak = parts.detach().amax(0)
    shift = peak.masked_fill(peak == -math.inf, 0.0)
    weights = (parts - shift).exp()
    total = weights.sum(0)
    hidden = total == 0
    total = total.masked_fill(hidden, 1.0)
    values = torch.stack([output.to(dtype) for output in outputs])
    values = values.masked_fill(none.unsqueeze(-1), 0.0)
    out = ((weights / total).unsqueeze(-1) * values).sum(0).masked_fill(hidden.unsqueeze(-1), 0.0)
    return out, (shift + total.log()).masked_fill(hidden, -math.inf)


def _places(cu_seqlens: Tensor, lens: Tensor, longest: int | None, tokens: int) -> Tensor:
    """Which token each place of the padded batch holds, ``(B, S)``; ``tokens`` for padding."""
    if longest is None:
        longest = int(lens.max()) if lens.numel() else 0
    steps = torch.arange(longest, device=cu_seqlens.device)
    return torch.where(steps < lens[:, None], cu_seqlens[:-1, None].long() + steps, tokens)


def _taken(rows: Tensor, places: Tensor) -> Tensor:
    """``rows[places]``, with a row of zeros behind the last: there may be none to point at."""
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[places]


def _put_back(padded: Tensor, places: Tensor, tokens: int, rest: float) -> Tensor:
    """The rows of a padded batch where `_places` has them, and ``rest`` in all other rows."""
    rows = padded.new_full((tokens + 1, *padded.shape[2:]), rest)
    return rows.index_put((places,), padded)[:tokens]


def _check_packed(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 3:
            raise ValueError(
                f"`{name}` must be of 3 dimensions, (tokens, heads, head dimension), got "
                f"{tuple(tensor.shape)}; pack it."
            )
    if key.size(0) != value.size(0):
        raise ValueError(
            f"`key` must be of the value's {value.size(0)} tokens, got {key.size(0)}; make them "
            "agree."
        )
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if (
            ends.dtype not in (torch.int32, torch.int64)
            or ends.shape != cu_seqlens_q.shape
            or ends.ndim != 1
            or not ends.numel()
        ):
            raise ValueError(
                f"`{name}` must be int32 or int64 of shape (sequences + 1,), the same for query "
                f"and key, got {ends.dtype} of {tuple(ends.shape)}; start it with 0."
            )


def _check_pages(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    seq_lens_kv: Tensor,
) -> None:
    tensors = (("query", query), ("key_pages", key_pages), ("value_pages", value_pages))
    for name, tensor in tensors:
        if tensor.ndim != 4:
            raise ValueError(
                f"`{name}` must be of 4 dimensions, got {tuple(tensor.shape)}; reshape it."
            )
    if (key_pages.size(0), key_pages.size(2)) != (value_pages.size(0), value_pages.size(2)):
        raise ValueError(
            "`key_pages` must be of the number and length of the value's pages, "
            f"{value_pages.size(0)} and {value_pages.size(2)}, got {key_pages.size(0)} and "
            f"{key_pages.size(2)}; make them agree."
        )
    batch = query.size(0)
    if (
        block_table.dtype not in (torch.int32, torch.int64)
        or block_table.ndim != 2
        or block_table.size(0) != batch
    ):
        raise ValueError(
            f"`block_table` must be int32 or int64 of shape ({batch}, pages), got "
            f"{block_table.dtype} of {tuple(block_table.shape)}; give one row per sequence."
        )
    _check_lengths("seq_lens_kv", seq_lens_kv, batch)


def _check_lengths(name: str, lens: Tensor, batch: int) -> None:
    if lens.shape != (batch,):
        raise ValueError(
            f"`{name}` must be of shape ({batch},), got {tuple(lens.shape)}; give one length per "
            "sequence."
        )


def _check_parts(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, tensors in (("outputs", outputs), ("lses", lses)):
        if isinstance(tensors, Tensor) or not all(isinstance(t, Tensor) for t in tensors):
            raise TypeError(f"`{name}` must be a list of tensors, one for each part.")
        for place, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                raise TypeError(
                    f"`{name}[{place}]` must be floating point, got {tensor.dtype}; give what "
                    "attention returned."
                )
    if not outputs or len(outputs) != len(lses):
        raise ValueError(
            f"`lses` must be one per output, and at least one, got {len(lses)} for "
            f"{len(outputs)}; give the two results of each part."
        )
    shape = outputs[0].shape
    for place, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.shape != shape:
            raise ValueError(
                f"`outputs[{place}]` must be of the first's shape {tuple(shape)}, got "
                f"{tuple(output.shape)}; broadcast it."
            )
        if lse.shape != shape[:-1]:
            raise ValueError(
                f"`lses[{place}]` must be of shape {tuple(shape[:-1])}, got {tuple(lse.shape)}; "
                "give one number per row."
            )
