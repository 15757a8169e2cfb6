"""`cudnn_sdpa_varlen` and `cudnn_sdpa_paged`: attention on tensors that lie packed or in pages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cudnn_mha import packed, paged, runtime, traced
from cudnn_mha.inputs import Numbers, make_options
from cudnn_mha.routes import Given
from cudnn_mha.terms import Wishes, make_terms


def cudnn_sdpa_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    window: tuple[int, int] | None = None,
    alibi: bool = False,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    workspace_limit: int | str | None = None,
    fallback: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several sequences that lie packed one after another.

    Sequence b has the slot of tokens ``cu_seqlens[b]`` up to ``cu_seqlens[b + 1]``. One plan
    serves all batches with as many sequences, as long ones and as many tokens, or fewer, up to
    the next powers of two; see ``TORCH_CUDNN_MHA_LENGTHS``. Nothing is read back to the host.

    Args:
        query: ``(Tq, Hq, Dqk)``, float16 or bfloat16 on a CUDA device; a view into a packed
            projection will do.
        key: ``(Tkv, Hk, Dqk)``; Hk divides Hq, as for `cudnn_sdpa` with ``enable_gqa``.
        value: ``(Tkv, Hv, Dv)``.
        cu_seqlens_q, cu_seqlens_kv: ``(B + 1,)`` int32 or int64 on the device, ascending from 0
            or more up to Tq and Tkv at most. On a device that is not checked, which would wait
            for it; on the CPU what is wrong raises, of lengths too.
        max_seqlen_q, max_seqlen_kv: at least the longest sequence; what a sequence is longer is
            ignored.
        seq_lens_q, seq_lens_kv: ``(B,)`` integers: only so many first tokens of each slot belong
            to the sequence, at most as many as it has; the rest is a gap, which may hold anything.
        dropout_p, is_causal, scale, causal_alignment, window, alibi, alibi_slopes, softcap, sinks:
            as for `cudnn_sdpa`, within each sequence.
        return_lse: also return the log-sum-exp ``(Hq, Tq)``, float32, natural logarithm.
        deterministic, workspace_limit, fallback: as for `cudnn_sdpa`.

    Returns:
        ``(Tq, Hq, Dv)``, contiguous; with ``return_lse`` the pair of it and the log-sum-exp.
        Tokens of no sequence get zeros, -inf, and zero gradients.

    Raises:
        CudnnSdpaUnsupportedError: ``fallback`` is False and cuDNN does not serve the call.
        ValueError, TypeError, RuntimeError: arguments that mean nothing; the message names them.
    """
    tensors = (
        query,
        key,
        value,
        None,
        seq_lens_q,
        seq_lens_kv,
        alibi_slopes,
        sinks,
        cu_seqlens_q,
        cu_seqlens_kv,
    )
    longest = (max_seqlen_q, max_seqlen_kv)
    numbers = (
        dropout_p,
        is_causal,
        scale,
        True,
        return_lse,
        deterministic,
        workspace_limit,
        fallback,
    )
    wishes = (causal_alignment, window, softcap, alibi)
    if traced.applies(tensors, return_lse):
        return traced.packed_call(tensors, longest, numbers, wishes)
    return _packed(tensors, longest, numbers, wishes)


@runtime.not_traced
def _packed(
    tensors: tuple[Any, ...], longest: tuple[int, int], numbers: Numbers, wishes: Wishes
) -> Tensor | tuple[Tensor, Tensor]:
    """The call that compilers leave as it is."""
    options = make_options(*numbers)
    terms = make_terms(options.is_causal, *wishes)
    return packed.compute(Given(*tensors), *longest, options, terms)


def cudnn_sdpa_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    seq_lens_q: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "bottom_right",
    window: tuple[int, int] | None = None,
    alibi: bool = False,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    page_layout: str = "HND",
    return_lse: bool = False,
    workspace_limit: int | str | None = None,
    fallback: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to keys and values in pages; forward only.

    The first page of sequence b holds its first keys; its last page may be filled in part. For
    one query (decoding), a few (speculation) or many (a prompt in chunks), the last of which
    belongs to the last key: hence the default alignment.

    Args:
        query: ``(B, Hq, Sq, Dqk)``, float16 or bfloat16 on a CUDA device, D a multiple of 8.
        key_pages: ``(pages, Hk, page size, Dqk)``, or ``(pages, page size, Hk, Dqk)`` with
            ``page_layout="NHD"``; in any layout that cuDNN can address, since it is never copied.
            Hk divides Hq. Slots of a page behind the last key must hold finite numbers, as those
            of a pool allocated with zeros do. cuDNN takes page sizes that are powers of two.
            Autocast does not cast pages, nor the query beside them.
        value_pages: likewise with Hv and Dv.
        block_table: ``(B, M)`` int32 or int64, the pages of each sequence in order; entries
            behind the last page in use may be anything. On a device entries are clamped to the
            pool, and lengths to what there is; on the CPU what is wrong raises.
        seq_lens_kv: ``(B,)`` integers on the device, keys of each sequence, at most M pages full.
        seq_lens_q: ``(B,)`` integers: how many of the first rows of the query are real; output
            zeros and log-sum-exp -inf for the others.
        is_causal, scale, causal_alignment, window, alibi, alibi_slopes, softcap, sinks: as for
            `cudnn_sdpa`.
        page_layout: ``"HND"`` or ``"NHD"``.
        return_lse: also return the log-sum-exp ``(B, Hq, Sq)``, float32, natural logarithm.
        workspace_limit, fallback: as for `cudnn_sdpa`.

    Returns:
        ``(B, Hq, Sq, Dv)`` in the memory order of query; with ``return_lse`` the pair of it and
        the log-sum-exp.

    Raises:
        CudnnSdpaUnsupportedError: ``fallback`` is False and cuDNN does not serve the call.
        ValueError, TypeError, RuntimeError: arguments that mean nothing; the message names them.
    """
    tensors = (query, key_pages, value_pages, None, seq_lens_q, seq_lens_kv, alibi_slopes, sinks)
    numbers = (0.0, is_causal, scale, True, return_lse, False, workspace_limit, fallback)
    wishes = (causal_alignment, window, softcap, alibi)
    if traced.applies(tensors, return_lse):
        return traced.paged_call(tensors, block_table, page_layout, numbers, wishes)
    return _paged(tensors, block_table, page_layout, numbers, wishes)


@runtime.not_traced
def _paged(
    tensors: tuple[Any, ...], table: Tensor, layout: str, numbers: Numbers, wishes: Wishes
) -> Tensor | tuple[Tensor, Tensor]:
    """The call that compilers leave as it is."""
    options = make_options(*numbers)
    terms = make_terms(options.is_causal, *wishes)
    return paged.compute(Given(*tensors), table, layout, options, terms)
