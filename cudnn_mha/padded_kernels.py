"""Padded calls as the dispatcher makes them: below autograd, each direction complete in itself.

The counterpart of `kernels` for what `F.scaled_dot_product_attention` cannot say. What the
backward needs of its forward is output, log-sum-exp, seed and offset; both directions reach their
plans by the same decision. Where cuDNN does not serve a call, the functions whose names begin
with ``reference_`` compute it by plain PyTorch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_mha import dispatch, padded, reference
from cudnn_mha.checks import Reason
from cudnn_mha.execution import run_backward, run_plans
from cudnn_mha.inputs import Options, addressable_copy, empty_output, without_data
from cudnn_mha.kernels import (
    Gradients,
    NotServed,
    gradient_of,
    in_layout,
    kept_weights,
    reduced,
    shifted_mask,
)
from cudnn_mha.padded import Drawn
from cudnn_mha.routes import Given, Manner, Route
from cudnn_mha.terms import Terms


@torch.no_grad()
def forward(
    given: Given, options: Options, terms: Terms, drawn: Drawn | None
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp ``(B, Hq, Sq)`` as the backward wants it, by cuDNN.

    The log-sum-exp is that of the real keys and the sinks; where a float mask has rows without an
    entry above -1e4 and there are no sinks, that of the scores less the row's largest entry.

    Args:
        given: the tensors, ``(B, H, S, D)`` of one batch size. Mask and sinks require a gradient
            where one is wanted of them.
        options, terms: the call's other arguments; ``return_lse`` is set.
        drawn: seed and offset of the dropout, where there is one.

    Raises:
        NotServed: cuDNN does not serve the call, one direction or the other.
    """
    route = _find(given, options, terms)
    assert route.spec is not None
    call = padded.prepared(route, given, drawn)
    output, lse = run_plans(
        call.inputs, call.sinks, route.spec.output, call.operands, route, gradient=False
    )
    output, lse = padded.without_padding(route, call, output, lse)
    assert lse is not None
    return in_layout(output, output_stride(given)), lse.contiguous()


@torch.no_grad()
def backward(
    grad_output: Tensor,
    given: Given,
    output: Tensor,
    lse: Tensor,
    options: Options,
    terms: Terms,
    drawn: Drawn | None,
) -> Gradients:
    """The gradients from what `forward` left, by cuDNN.

    Raises:
        NotServed: as for `forward`.
    """
    route = _find(given, options, terms)
    assert route.spec is not None and route.spec.grad_output is not None
    call = padded.prepared(route, given, drawn)
    query, key, value, bias, _ = call.inputs
    if call.hidden_q is not None:
        grad_output = grad_output.masked_fill(call.hidden_q, 0)
        if bias is None and not route.spec.modified:
            # Padding has zeros for scores here, and any finite number keeps its weights finite.
            lse = lse.masked_fill(call.hidden_q[..., 0], 0)
    missing = value.shape[-1] - output.shape[-1]
    if missing:
        output, grad_output = (F.pad(t, (0, missing)) for t in (output, grad_output))
    output = addressable_copy(in_layout(output, route.spec.output.stride))
    if route.manner is Manner.RAGGED:
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    found = run_backward(
        route,
        grad_output,
        query,
        key,
        value,
        bias,
        call.sinks,
        output,
        lse,
        call.operands,
    )
    grad_query, grad_key, grad_value, grad_bias, grad_sinks = found
    if call.hidden_q is not None and call.hidden_kv is not None:
        grad_query = grad_query.masked_fill(call.hidden_q, 0)
        grad_key = grad_key.masked_fill(call.hidden_kv, 0)
        grad_value = grad_value.masked_fill(call.hidden_kv, 0)
    if options.scale is not None and options.scale <= 0:  # the query was multiplied by this
        grad_query = grad_query * math.copysign(options.scale != 0, options.scale)
    return Gradients(
        gradient_of(given.query, grad_query),
        gradient_of(given.key, grad_key),
        gradient_of(given.value, grad_value),
        None if grad_bias is None or given.mask is None else reduced(grad_bias, given.mask),
        None if grad_sinks is None or given.sinks is None else grad_sinks.to(given.sinks.dtype),
    )


def _find(given: Given, options: Options, terms: Terms) -> Route:
    """The route of a call that has plans."""
    if not dispatch.plain(*(t for t in given if t is not None)):
        raise NotServed((dispatch.not_for_cudnn(given.query),))
    if 0 in (*given.query.shape, *given.key.shape, *given.value.shape):
        raise NotServed((Reason("empty", "there is nothing for cuDNN to compute"),))
    route = padded.find(given, options, terms, True, chosen=True)
    if route.reasons:
        raise NotServed(route.reasons)
    return route


def output_stride(given: Given) -> tuple[int, ...]:
    """The strides of an operator's output."""
    return empty_output(without_data(given.query), given.value.shape[-1]).stride()


@torch.no_grad()
def reference_forward(
    given: Given, options: Options, terms: Terms, drawn: Drawn | None
) -> tuple[Tensor, Tensor]:
    """The same as `forward` by plain PyTorch, on any device."""
    output, lse = reference.attention(
        *given[:3],
        _mask(given),
        options.dropout_p,
        scale=options.scale,
        dropout_mask=_kept(given, options, drawn),
        **padded.terms_of_the_reference(given, terms),
    )
    return in_layout(output, output_stride(given)), lse.float().contiguous()


@torch.no_grad()
def reference_backward(
    grad_output: Tensor,
    given: Given,
    output: Tensor,
    lse: Tensor,
    options: Options,
    terms: Terms,
    drawn: Drawn | None,
) -> Gradients:
    """The same as `backward` by plain PyTorch, on any device."""
    found = reference.gradients(
        grad_output,
        *given[:3],
        output,
        lse,
        _mask(given),
        options.dropout_p,
        scale=options.scale,
        dropout_mask=_kept(given, options, drawn),
        **padded.terms_of_the_reference(given, terms),
    )
    mask, sinks = given.mask, given.sinks
    query, key, value = (
        torch.empty_like(t).copy_(grad) for t, grad in zip(given[:3], found[:3], strict=True)
    )
    grad_mask = reduced(found[3], mask) if mask is not None and mask.requires_grad else None
    grad_sinks = None
    if sinks is not None and sinks.requires_grad:
        grad_sinks = found[4].to(sinks.dtype)
    return Gradients(query, key, value, grad_mask, grad_sinks)


def _mask(given: Given) -> Tensor | None:
    return shifted_mask(given.mask) if given.sinks is None else given.mask


def _kept(given: Given, options: Options, drawn: Drawn | None) -> Tensor | None:
    seed = None if drawn is None else drawn[0]
    return kept_weights(given.query, given.key, options.dropout_p, seed)
