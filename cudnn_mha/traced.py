"""Calls that PyTorch's function cannot say, as compilers see them: operators, or plain PyTorch.

What is looked at here, addresses and plans apart, a compiler can look at: shapes, dtypes, switches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_mha import config, packed, padded, paged
from cudnn_mha.extended_ops import (
    sdpa_padded_forward,
    sdpa_padded_inference,
    sdpa_paged,
    sdpa_varlen_forward,
    sdpa_varlen_inference,
)
from cudnn_mha.inputs import Numbers, Options, four_dimensional, make_options
from cudnn_mha.ops import refuse_compiled
from cudnn_mha.routes import Given
from cudnn_mha.terms import Terms, Wishes, make_terms


def applies(tensors: Sequence[object], return_lse: bool) -> bool:
    """Whether a compiler looks on that can trace a call.

    It cannot where the log-sum-exp may need a gradient, which that of the operators has not.
    """
    if not torch.compiler.is_compiling():
        return False
    return not (return_lse and wants_gradient(tensors)) or not _allowed()


def _allowed() -> bool:
    """Whether a call becomes an operator; else the compiler sees plain PyTorch."""
    return (
        not (config.current is not None and config.current.disabled)
        and torch._C._get_cudnn_sdp_enabled()
        and not torch._C._are_functorch_transforms_active()
    )


def _with_alibi(terms: Terms, given: Given) -> Terms:
    return dataclasses.replace(terms, alibi=terms.alibi or given.slopes is not None)


def _plain(options: Options, result: tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    """What plain PyTorch computed, if that is allowed."""
    if not options.fallback:
        refuse_compiled()
    return result if options.return_lse else result[0]


def wants_gradient(tensors: Sequence[object]) -> bool:
    """Whether autograd may want a gradient of some of these."""
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in tensors
    )


def _keywords(options: Options, wishes: Wishes) -> dict[str, Any]:
    """What all operators take by keyword.

    Raises:
        ValueError, TypeError: a wish means nothing; the message names it.
    """
    make_terms(options.is_causal, *wishes)
    causal_alignment, window, softcap, alibi = wishes
    return {
        "scale": options.scale,
        "causal_alignment": causal_alignment,
        "window": (-1, -1) if window is None else window,
        "alibi": alibi,
        "softcap": softcap or 0.0,
        "deterministic": options.deterministic,
        "workspace_limit": options.workspace_limit,
        "fallback": options.fallback,
    }


def padded_call(
    tensors: tuple[Any, ...], numbers: Numbers, wishes: Wishes
) -> Tensor | tuple[Tensor, Tensor]:
    """`cudnn_sdpa` by the operators.

    Args:
        tensors: query, key, value, mask, both lengths, slopes and sinks.
        numbers, wishes: the caller's other arguments.
    """
    options = make_options(*numbers)
    asked = _keywords(options, wishes)
    given = padded.checked(Given(*tensors), options)
    if not _allowed():
        terms = _with_alibi(make_terms(options.is_causal, *wishes), given)
        return _plain(options, padded.by_reference(given, options, terms))
    query, key, value = four_dimensional(*given[:3], options)
    call = (query, key, value, *given[3:8], options.dropout_p, options.is_causal)
    if wants_gradient(given):
        output: Tensor = sdpa_padded_forward(
            *call,
            **asked,
            bias_gradient=given.mask is not None and given.mask.requires_grad,
            sinks_gradient=given.sinks is not None and given.sinks.requires_grad,
        )[0]
        return output[0] if given.query.dim() == 3 else output
    output, lse = sdpa_padded_inference(*call, **asked, return_lse=options.return_lse)
    if given.query.dim() == 3:
        output, lse = output[0], lse[0] if options.return_lse else lse
    return (output, lse) if options.return_lse else output


def packed_call(
    tensors: tuple[Any, ...], longest: tuple[int, int], numbers: Numbers, wishes: Wishes
) -> Tensor | tuple[Tensor, Tensor]:
    """`cudnn_sdpa_varlen` by the operators.

    Args:
        tensors: what `Given` has, in its order.
        longest: at least the longest sequences of queries and of keys.
        numbers, wishes: the caller's other arguments.
    """
    options = make_options(*numbers)
    asked = _keywords(options, wishes)
    given = packed.checked(Given(*tensors), *longest, options)
    if not _allowed():
        terms = _with_alibi(make_terms(options.is_causal, *wishes), given)
        own = packed.within_tokens(given, *longest)
        return _plain(options, packed.by_reference(given, *own, options, terms))
    call = (
        *given[:3],
        given.starts_q,
        given.starts_kv,
        *given[4:8],
        *longest,
        options.dropout_p,
        options.is_causal,
    )
    if wants_gradient(given):
        sinks_gradient = given.sinks is not None and given.sinks.requires_grad
        result: Tensor = sdpa_varlen_forward(*call, **asked, sinks_gradient=sinks_gradient)[0]
        return result
    output, lse = sdpa_varlen_inference(*call, **asked, return_lse=options.return_lse)
    return (output, lse) if options.return_lse else output


def paged_call(
    tensors: tuple[Any, ...], table: Tensor, layout: str, numbers: Numbers, wishes: Wishes
) -> Tensor | tuple[Tensor, Tensor]:
    """`cudnn_sdpa_paged` by the operator.

    Args:
        tensors: query, pages of keys and values, None, both lengths, slopes and sinks.
        table: the pages of each sequence.
        layout: where pages have their heads.
        numbers, wishes: the caller's other arguments.
    """
    options = make_options(*numbers)
    asked = _keywords(options, wishes)
    given = paged.checked(Given(*tensors), table, layout, options)
    if not _allowed():
        terms = _with_alibi(make_terms(options.is_causal, *wishes), given)
        return _plain(options, paged.by_reference(given, table, options, terms))
    call = (*given[:3], table, given.lengths_kv, given.lengths_q, given.slopes, given.sinks)
    del asked["deterministic"]  # there is no backward
    output, lse = sdpa_paged(*call, options.is_causal, **asked, return_lse=options.return_lse)
    return (output, lse) if options.return_lse else output
