"""Packed sequences as the dispatcher calls them: below autograd, each direction complete in itself.

The counterpart of `kernels` for tensors ``(tokens, H, D)``. What the backward needs of its forward
is output, log-sum-exp and the dropout's seed; both directions reach their plans by the same
decision. Where cuDNN does not serve a call, the functions whose names begin with ``reference_``
compute it by plain PyTorch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_mha import devices, dispatch, packed, padded_kernels
from cudnn_mha.checks import Reason
from cudnn_mha.execution import run_backward
from cudnn_mha.inputs import Options, addressable_copy
from cudnn_mha.kernels import Gradients, NotServed
from cudnn_mha.padded import Drawn
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
    drawn: Drawn | None = None,
    *,
    padding: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output ``(Tq, Hq, Dv)``, contiguous, and log-sum-exp ``(Hq, Tq)``, by cuDNN.

    Args:
        given: tensors that are valid; sinks require a gradient where one is wanted of them.
        longest_q, longest_kv: at least the longest sequences.
        options: ``return_lse`` is set.
        terms: the call's other arguments.
        gradient: the backward will be wanted, so both directions are served or neither.
        drawn: seed and offset of the dropout, where there is one.
        padding: a call that cuDNN knows on a padded batch alone is computed on one.

    Raises:
        NotServed: cuDNN does not serve the call.
    """
    longest = packed.within_tokens(given, longest_q, longest_kv)
    if padding and _needs_padding(given, *longest, gradient):
        call, queries, _ = packed.on_padding(given, *longest)
        output, lse = padded_kernels.forward(call, options, terms, drawn)
        return queries.packed(output), queries.packed(lse, -torch.inf).mT
    route = _find(given, *longest, options, terms, gradient)
    output, found = packed.run(route, given, *longest, False, drawn)
    assert found is not None
    return output, found


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
    drawn: Drawn | None = None,
    *,
    padding: bool = False,
) -> Gradients:
    """The gradients from what `forward` left, by cuDNN.

    Raises:
        NotServed: as for `forward`.
    """
    longest = packed.within_tokens(given, longest_q, longest_kv)
    if padding and _needs_padding(given, *longest, True):
        batch = packed.on_padding(given, *longest)
        stash = _padded_stash(batch, grad_output, output, lse)
        return _packed(batch, padded_kernels.backward(*stash, options, terms, drawn))
    route = _find(given, *longest, options, terms, True)
    inputs, sinks, operands = packed.prepared(route, given, *longest, drawn)
    query, key, value, *_ = inputs
    missing = value.shape[-1] - output.shape[-1]
    if missing:
        output, grad_output = (F.pad(t, (0, missing)) for t in (output, grad_output))
    output = addressable_copy(output.contiguous())
    by_token = lse.mT.contiguous().mT
    *found, _, grad_sinks = run_backward(
        route, grad_output, query, key, value, None, sinks, output, by_token, operands
    )
    grad_query, grad_key, grad_value = (
        grad[..., : tensor.shape[-1]]
        for grad, tensor in zip(found[:3], given[:3], strict=True)
        if grad is not None
    )
    if options.scale is not None and options.scale <= 0:  # the query was multiplied by this
        grad_query = grad_query * math.copysign(options.scale != 0, options.scale)
    if grad_sinks is not None and given.sinks is not None:
        grad_sinks = grad_sinks.to(given.sinks.dtype)
    return Gradients(grad_query, grad_key, grad_value, sinks=grad_sinks)


def _needs_padding(given: Given, longest_q: int, longest_kv: int, gradient: bool) -> bool:
    return (
        not _is_empty(given, longest_q, longest_kv)
        and dispatch.plain(*(t for t in given if t is not None))
        and packed.goes_through_padding(given, gradient, None)
    )


def _is_empty(given: Given, longest_q: int, longest_kv: int) -> bool:
    return 0 in (*given.query.shape, *given.key.shape, *given.value.shape, longest_q, longest_kv)


def _find(
    given: Given,
    longest_q: int,
    longest_kv: int,
    options: Options,
    terms: Terms,
    gradient: bool,
) -> Route:
    """The route of a call that has plans."""
    if not dispatch.plain(*(t for t in given if t is not None)):
        raise NotServed((dispatch.not_for_cudnn(given.query),))
    if _is_empty(given, longest_q, longest_kv):
        raise NotServed((Reason("empty", "there is nothing for cuDNN to compute"),))
    if packed.goes_through_padding(given, gradient, None):
        sm = devices.cuda(given.query.device.index).sm
        message = f"cuDNN has no gradient of packed sequences on sm_{sm}"
        raise NotServed((Reason("packed_gradient", message),))
    route = packed.find(given, longest_q, longest_kv, options, terms, gradient, chosen=True)
    if route.reasons:
        raise NotServed(route.reasons)
    return route


@torch.no_grad()
def reference_forward(
    given: Given,
    longest_q: int,
    longest_kv: int,
    options: Options,
    terms: Terms,
    drawn: Drawn | None,
) -> tuple[Tensor, Tensor]:
    """The same as `forward` by plain PyTorch, on any device."""
    longest = packed.within_tokens(given, longest_q, longest_kv)
    if _is_empty(given, *longest):
        return packed.by_reference(given, *longest, options, terms)
    call, queries, _ = packed.on_padding(given, *longest)
    output, lse = padded_kernels.reference_forward(call, options, terms, drawn)
    return queries.packed(output), queries.packed(lse, -torch.inf).mT


@torch.no_grad()
def reference_backward(
    grad_output: Tensor,
    given: Given,
    output: Tensor,
    lse: Tensor,
    longest_q: int,
    longest_kv: int,
    options: Options,
    terms: Terms,
    drawn: Drawn | None,
) -> Gradients:
    """The same as `backward` by plain PyTorch, on any device."""
    longest = packed.within_tokens(given, longest_q, longest_kv)
    if _is_empty(given, *longest):
        query, key, value = (t.new_zeros(t.shape) for t in given[:3])
        sinks = None if given.sinks is None else torch.zeros_like(given.sinks)
        return Gradients(query, key, value, sinks=sinks)
    batch = packed.on_padding(given, *longest)
    stash = _padded_stash(batch, grad_output, output, lse)
    return _packed(batch, padded_kernels.reference_backward(*stash, options, terms, drawn))


_Batch = tuple[Given, packed.Side, packed.Side]


def _padded_stash(
    batch: _Batch, grad_output: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Given, Tensor, Tensor]:
    """What the backward on a padded batch is given."""
    call, queries, _ = batch
    return queries.padded(grad_output), call, queries.padded(output), queries.padded(lse.mT)


def _packed(batch: _Batch, found: Gradients) -> Gradients:
    _, queries, keys = batch
    return Gradients(
        queries.packed(found.query),
        keys.packed(found.key),
        keys.packed(found.value),
        sinks=found.sinks,
    )
