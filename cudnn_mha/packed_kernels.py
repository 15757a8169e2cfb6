"""Packed sequences as the dispatcher calls them: below autograd, each direction complete in itself.

The counterpart of `kernels` for tensors ``(tokens, H, D)``. What the backward needs of its forward
is output and log-sum-exp; both directions reach their plans by the same decision.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_mha import devices, dispatch, packed, runtime
from cudnn_mha.checks import Reason
from cudnn_mha.execution import run_backward
from cudnn_mha.inputs import Options, addressable_copy
from cudnn_mha.kernels import NotServed
from cudnn_mha.routes import Given, Route
from cudnn_mha.terms import Terms


@torch.no_grad()
def forward(
    given: Given,
    longest_q: int,
    longest_kv: int,
    options: Options,
    terms: Terms,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Output ``(Tq, Hq, Dv)``, contiguous, and log-sum-exp ``(Hq, Tq)``, by cuDNN.

    Args:
        given: query, key, value, where their sequences start, and perhaps lengths; nothing else.
        longest_q, longest_kv: at least the longest sequences.
        options: without dropout; ``return_lse`` is set.
        terms: which keys a query sees.
        gradient: the backward will be wanted, so both directions are served or neither.

    Raises:
        NotServed: cuDNN does not serve the call.
    """
    longest = packed.within_tokens(given, longest_q, longest_kv)
    output, lse = packed.run(
        _find(given, *longest, options, terms, gradient), given, *longest, gradient
    )
    assert lse is not None
    return output, lse


@torch.no_grad()
def backward(
    grad_output: Tensor,
    given: Given,
    output: Tensor,
    lse: Tensor,
    longest_q: int,
    longest_kv: int,
    options: Options,
    terms: Terms,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value from what `forward` left, by cuDNN.

    Raises:
        NotServed: as for `forward`.
    """
    longest = packed.within_tokens(given, longest_q, longest_kv)
    route = _find(given, *longest, options, terms, True)
    assert route.spec is not None
    bounded = route.spec.tokens_q is not None
    query, key, value, *_ = packed.prepare(given, options, dense_query=bounded)
    runtime.keep_for_captures(route)
    operands = route.operands | packed.sequences_of(route, given, *longest)
    missing = value.shape[-1] - output.shape[-1]
    if missing:
        output, grad_output = (F.pad(t, (0, missing)) for t in (output, grad_output))
    output = addressable_copy(output.contiguous())
    by_token = lse.mT.contiguous().mT
    found = run_backward(
        route, grad_output, query, key, value, None, None, output, by_token, operands
    )[:3]
    grad_query, grad_key, grad_value = (
        grad[..., : tensor.shape[-1]] for grad, tensor in zip(found, given[:3], strict=True)
    )
    if options.scale is not None and options.scale <= 0:  # the query was multiplied by this
        grad_query = grad_query * math.copysign(options.scale != 0, options.scale)
    return grad_query, grad_key, grad_value


def _find(
    given: Given,
    longest_q: int,
    longest_kv: int,
    options: Options,
    terms: Terms,
    gradient: bool,
) -> Route:
    """The route of a call that has plans."""
    try:
        packed.validate(given, longest_q, longest_kv, options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise NotServed((Reason("arguments", str(error)),)) from error
    if not dispatch.plain(*(t for t in given if t is not None)):
        raise NotServed((dispatch.not_for_cudnn(given.query),))
    if 0 in (*given.query.shape, *given.key.shape, *given.value.shape, longest_q, longest_kv):
        raise NotServed((Reason("empty", "there is nothing for cuDNN to compute"),))
    if packed.goes_through_padding(given, gradient, None):
        sm = devices.cuda(given.query.device.index).sm
        message = f"cuDNN has no gradient of packed sequences on sm_{sm}"
        raise NotServed((Reason("packed_gradient", message),))
    route = packed.find(given, longest_q, longest_kv, options, terms, gradient, chosen=True)
    if route.reasons:
        raise NotServed(route.reasons)
    return route
