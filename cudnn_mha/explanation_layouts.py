"""`explain` for calls whose sequences are packed, or whose keys and values lie in pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_mha import packed, paged
from cudnn_mha.checks import Reason
from cudnn_mha.explanation import TOLD, Asked, Explanation, given_operands
from cudnn_mha.inputs import make_options, outline
from cudnn_mha.routes import Route
from cudnn_mha.terms import make_terms

_NOTHING = Reason("empty", "there is nothing for cuDNN to compute")

_IN_PAGES = "paged: by lengths and the pages of each sequence"


def explain_varlen(
    query: Tensor | Sequence[int],
    key: Tensor | Sequence[int],
    value: Tensor | Sequence[int],
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_kv: Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    window: tuple[int, int] | None = None,
    alibi: bool = False,
    alibi_slopes: Tensor | bool | None = None,
    softcap: float | None = None,
    sinks: Tensor | bool | None = None,
    seq_lens_q: Tensor | bool | None = None,
    seq_lens_kv: Tensor | bool | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    workspace_limit: int | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    requires_grad: bool | None = None,
    gpu: str | None = None,
) -> Explanation:
    """What `cudnn_sdpa_varlen` would do with a call; see `explain`.

    Args:
        query: ``(Tq, Hq, Dqk)``, a tensor, whose values are not read, or a shape.
        key, value: likewise.
        cu_seqlens_q, cu_seqlens_kv: likewise, ``(B + 1,)``.
        max_seqlen_q, max_seqlen_kv, dropout_p, is_causal, scale: as for `cudnn_sdpa_varlen`.
        causal_alignment, window, alibi, softcap: as for `cudnn_sdpa_varlen`.
        seq_lens_q, seq_lens_kv, alibi_slopes, sinks: a tensor, or True where the call has one.
        return_lse, deterministic, workspace_limit: as for `cudnn_sdpa_varlen`.
        dtype, requires_grad, gpu: as for `explain`.

    Raises:
        ValueError, TypeError, RuntimeError: as for `cudnn_sdpa_varlen`, and for an unknown
            ``gpu``.
    """
    options = make_options(
        dropout_p, is_causal, scale, True, return_lse, deterministic, workspace_limit, True
    )
    operands = given_operands(
        seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv, alibi_slopes=alibi_slopes, sinks=sinks
    )
    terms = make_terms(is_causal, causal_alignment, window, softcap, alibi)
    terms = dataclasses.replace(terms, alibi=alibi or "alibi_slopes" in operands)
    given: dict[str, Any] = {"query": query, "key": key, "value": value}
    given |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    asked = Asked(given, operands, dtype, requires_grad, gpu)
    with torch.enable_grad():
        q, k, v = made = [asked.meta(name) for name in ("query", "key", "value")]
        starts = [asked.meta(name, torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_kv")]
        call = asked.call(q, k, v, starts=starts)
        longest = max_seqlen_q, max_seqlen_kv
        packed.validate(call, *longest, options)
        if starts[0].numel() == 1 or 0 in longest:
            route = Route(options, terms, outline(q, v, options), (_NOTHING,))
        else:
            route = packed.describe(call, *longest, options, terms, asked.gradient, asked.device)
        served_by = "cuDNN" if route.packed else "cuDNN, on a padded batch"
        return asked.explained(route, [*made, *starts], TOLD.get(route.manner), served_by)


def explain_paged(
    query: Tensor | Sequence[int],
    key_pages: Tensor | Sequence[int],
    value_pages: Tensor | Sequence[int],
    block_table: Tensor | Sequence[int],
    *,
    seq_lens_q: Tensor | bool | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "bottom_right",
    window: tuple[int, int] | None = None,
    alibi: bool = False,
    alibi_slopes: Tensor | bool | None = None,
    softcap: float | None = None,
    sinks: Tensor | bool | None = None,
    page_layout: str = "HND",
    return_lse: bool = False,
    workspace_limit: int | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    gpu: str | None = None,
) -> Explanation:
    """What `cudnn_sdpa_paged` would do with a call; see `explain`.

    Args:
        query: ``(B, Hq, Sq, Dqk)``, a tensor, whose values are not read, or a shape.
        key_pages, value_pages: likewise, in the order that page_layout names.
        block_table: likewise, ``(B, M)``.
        is_causal, scale, causal_alignment, window, alibi, softcap: as for `cudnn_sdpa_paged`.
        seq_lens_q, alibi_slopes, sinks: a tensor, or True where the call has one.
        page_layout, return_lse, workspace_limit: as for `cudnn_sdpa_paged`.
        dtype, gpu: as for `explain`.

    Raises:
        ValueError, TypeError, RuntimeError: as for `cudnn_sdpa_paged`, and for an unknown ``gpu``.
    """
    options = make_options(0.0, is_causal, scale, True, return_lse, False, workspace_limit, True)
    operands = given_operands(
        seq_lens_q=seq_lens_q, seq_lens_kv=True, alibi_slopes=alibi_slopes, sinks=sinks
    )
    terms = make_terms(is_causal, causal_alignment, window, softcap, alibi)
    terms = dataclasses.replace(terms, alibi=alibi or "alibi_slopes" in operands)
    given: dict[str, Any] = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
    asked = Asked(given | {"block_table": block_table}, operands, dtype, False, gpu)
    q = asked.meta("query")
    key, value = paged.heads_first(asked.meta("key_pages"), asked.meta("value_pages"), page_layout)
    table = asked.meta("block_table", torch.int32)
    call = asked.call(q, q, q)._replace(key=key, value=value)  # lengths are those of queries
    paged.validate(call, table, options)
    if 0 in table.shape:
        route = Route(options, terms, outline(q, value, options), (_NOTHING,))
    else:
        route = paged.describe(call, table, options, terms, asked.device)
    return asked.explained(route, [q, key, value, table], _IN_PAGES)
