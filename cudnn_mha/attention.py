"""Runs the plans of a decided call, and ties the backward to the forward for autograd."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_mha import dispatch, lse_gradient, runtime
from cudnn_mha.checks import Kind, Reason
from cudnn_mha.dispatch import Decision
from cudnn_mha.errors import CudnnSdpaUnsupportedError
from cudnn_mha.inputs import Inputs
from cudnn_mha.plan import Plan
from cudnn_mha.spec import AttentionSpec, TensorSpec

logger = logging.getLogger("cudnn_mha")


def attend(decision: Decision, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp (None unless asked for) of a call that cuDNN serves.

    Raises:
        torch.OutOfMemoryError: the output or the workspace cannot be allocated.
    """
    query, key, value, bias, shift = inputs
    seed = offset = None
    if decision.options.dropout_p:
        seed, offset = draw(query.device)
    result: Any
    if decision.gradient:
        result = apply(query, key, value, bias, seed, offset, decision)
        output, lse = result if decision.options.return_lse else (result, None)
    else:
        output, lse = forward(decision, query, key, value, bias, seed, offset)
    if not decision.as_is:
        output = output[..., : decision.outline.dim_v]
        if decision.outline.ndim == 3:
            output = output[0]
    if lse is None:
        return output, None
    lse = lse.squeeze(-1)
    if shift is not None:
        lse = lse + shift.squeeze(-1)
    return output, lse[0] if decision.outline.ndim == 3 else lse


def draw(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset of cuDNN's generator of dropout masks, 0-d int64.

    Drawn by PyTorch's generator on the device, so that `torch.manual_seed` reproduces them and
    every replay of a captured CUDA graph draws anew.
    """
    seed, offset = torch.randint(2**31, (2,), device=device).unbind()
    return seed, offset


def forward(
    decision: Decision,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Output, and log-sum-exp where the spec has it, of prepared tensors."""
    plan: Plan = decision.forward.plan  # type: ignore[union-attr,assignment]
    if decision.like_query:
        output = torch.empty_like(query)  # the cheapest way to allocate
    else:
        layout = decision.spec.output  # type: ignore[union-attr]
        output = query.new_empty_strided(layout.shape, decision.output_stride)
    addresses = [query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr()]
    if decision.bare:
        run(plan, addresses)
        return output, None
    lse = None
    if plan.spec.lse:
        lse = _empty_lse(decision, output)
        addresses.append(lse.data_ptr())
    if bias is not None or seed is not None:
        addresses += [t.data_ptr() for t in (bias, seed, offset) if t is not None]
    if decision.told is not None:
        runtime.keep_for_captures(decision)
        addresses += decision.told.forward
    run(plan, addresses)
    return output, lse


def _empty_lse(decision: Decision, output: Tensor) -> Tensor:
    """Room for the log-sum-exp: ``empty_like`` takes the least host time."""
    batch, heads, seq, _ = output.shape
    if decision.told is not None and decision.told.by_token:
        rows = output.new_empty((batch, seq, heads, 1), dtype=torch.float32)
        return rows.transpose(1, 2)
    if decision.like_lse is None:
        shape = (batch, heads, seq, 1)
        if output.is_cuda and torch.cuda.is_current_stream_capturing():  # no time to make one
            return output.new_empty(shape, dtype=torch.float32)
        decision.like_lse = _scalar(output.device).expand(shape)
    return torch.empty_like(decision.like_lse, memory_format=torch.contiguous_format)


@functools.cache
def _scalar(device: torch.device) -> Tensor:
    """A float32 on that device, which nobody reads."""

    def make() -> Tensor:
        return torch.empty(1, dtype=torch.float32, device=device)

    return runtime.outside_pools(make)


def run(plan: Plan, addresses: Sequence[int]) -> None:
    """Runs on the current stream of the plan's device, whatever device is current."""
    index: int = plan.device.index  # type: ignore[assignment]
    if runtime.current_device() == index:
        plan.run(addresses, runtime.current_stream(index))
        return
    with torch.cuda.device(index):
        plan.run(addresses, runtime.current_stream(index))


def _empty(layout: TensorSpec, like: Tensor) -> Tensor:
    if like.shape == layout.shape and like.stride() == layout.stride:
        return torch.empty_like(like)
    return like.new_empty_strided(layout.shape, layout.stride)


class _Attention(torch.autograd.Function):
    """Stashes the prepared tensors, the output, the log-sum-exp and the dropout's seed."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        offset: Tensor | None,
        decision: Decision,
    ) -> Any:
        output, lse = forward(decision, query, key, value, bias, seed, offset)
        ctx.save_for_backward(query, key, value, bias, output, lse, seed, offset)
        ctx.decision = decision
        if not decision.options.return_lse:
            return output
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        refuse_second_order()
        saved = ctx.saved_tensors
        if grad_lse is not None:
            gradients = _through_lse(ctx.decision, grad_output, grad_lse, *saved)
            return (*gradients, None, None, None)
        if grad_output is None:
            return (None,) * 7
        try:
            gradients = backward(ctx.decision, grad_output, *saved)
        except torch.OutOfMemoryError as error:
            gradients = _recompute(ctx.decision, grad_output, *saved, error=error)
        return (*gradients, None, None, None)


def refuse_second_order() -> None:
    """Raises where a gradient of the gradient is asked for, which no kernel computes."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "cuDNN attention has no double backward: it was called with create_graph=True; "
            "compute this attention under torch.backends.cuda.enable_cudnn_sdp(False)"
        )


# `Function.apply` without its look at functorch's transforms, which the caller has excluded.
apply = super(torch.autograd.Function, _Attention).apply


def backward(
    decision: Decision,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    offset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias of prepared tensors; None where the bias has none."""
    if bias is not None:
        # Weights exp(score - lse) of a row without keys: exp(-inf), not exp(-inf + inf).
        lse = lse.masked_fill(lse == -math.inf, math.inf)
    plan, grad_output = decision.backward_plan(grad_output)
    spec, told = plan.spec, decision.told
    if told is not None and told.backward_spec is not None:
        spec = told.backward_spec
        wanted = _empty_lse(decision, output)
        lse = lse if lse.stride() == wanted.stride() else wanted.copy_(lse)
    if decision.like_inputs and seed is None and told is None:
        # Spelled out for the common case: between autograd's own code this one runs cold, and
        # costs more than twice the host time that it takes in a loop of its own.
        grad_query = torch.empty_like(query)
        grad_key = torch.empty_like(key)
        grad_value = torch.empty_like(value)
        run(
            plan,
            (
                query.data_ptr(),
                key.data_ptr(),
                value.data_ptr(),
                output.data_ptr(),
                lse.data_ptr(),
                grad_output.data_ptr(),
                grad_query.data_ptr(),
                grad_key.data_ptr(),
                grad_value.data_ptr(),
            ),
        )
        return grad_query, grad_key, grad_value, None
    assert spec.grad_query and spec.grad_key and spec.grad_value
    grad_query = _empty(spec.grad_query, query)
    grad_key = _empty(spec.grad_key, key)
    grad_value = _empty(spec.grad_value, value)
    operands = [query, key, value, output, lse, grad_output, grad_query, grad_key, grad_value]
    grad_bias = None
    if spec.grad_bias is not None:
        grad_bias = _empty(spec.grad_bias, query)
        operands.append(grad_bias)
    addresses = [t.data_ptr() for t in operands]
    addresses[5:5] = [t.data_ptr() for t in (bias, seed, offset) if t is not None]
    if told is not None:
        runtime.keep_for_captures(decision)
        addresses[5:5] = told.backward
        addresses += told.gradients
    run(plan, addresses)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return grad_query, grad_key, grad_value, grad_bias


def widened(decision: Decision) -> tuple[Decision, AttentionSpec]:
    """The decision with a backward that takes a gradient of the log-sum-exp, and its graph."""
    assert decision.spec is not None
    wide = dataclasses.replace(
        decision,
        spec=lse_gradient.widened(decision.spec),
        backward={},
        told=None,
        like_inputs=False,
    )
    assert wide.spec is not None
    return wide, wide.backward_spec(wide.spec.output)


def _through_lse(
    decision: Decision,
    grad_output: Tensor | None,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    offset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients where the log-sum-exp has one too; see `lse_gradient`."""
    assert decision.device is not None
    wide, spec = widened(decision)
    assert wide.spec is not None
    slot, reasons = dispatch.check_and_find(spec, decision.device, decision.options.workspace_limit)
    if slot is None:
        raise lse_gradient.no_gradient(reasons)
    wide.backward[wide.spec.output.stride] = slot
    dim = value.shape[-1]
    rows, grad_rows = lse.squeeze(-1), grad_lse.squeeze(-1)
    value, output, grad_output = lse_gradient.widen(
        wide.spec, value, output, rows, grad_output, grad_rows
    )
    grad_query, grad_key, grad_value, grad_bias = backward(
        wide, grad_output, query, key, value, bias, output, lse.contiguous(), seed, offset
    )
    return grad_query, grad_key, grad_value[..., :dim], grad_bias


def _recompute(
    decision: Decision,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    offset: Tensor | None,
    *,
    error: torch.OutOfMemoryError,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients by PyTorch, for want of memory for cuDNN's workspace."""
    del output, lse, offset
    assert decision.spec is not None
    message = f"no memory for the backward's workspace: {error}"
    reason = Reason("workspace", message, Kind.UNAVAILABLE)
    if seed is not None or not decision.options.fallback:
        raise CudnnSdpaUnsupportedError(str(decision.spec), (reason,)) from error
    query, key, value = (t.detach().requires_grad_() for t in (query, key, value))
    bias = None if bias is None else bias.detach().requires_grad_(decision.bias_gradient)
    options = dataclasses.replace(
        decision.options,
        scale=decision.spec.scale,
        enable_gqa=query.shape[1] != key.shape[1] or query.shape[1] != value.shape[1],
        return_lse=False,
    )
    logger.warning("%s; the gradients are recomputed by PyTorch", reason)
    with torch.enable_grad():
        result, _ = dispatch.compute(query, key, value, bias, options, gradient=True)
    wanted = [query, key, value]
    if bias is not None and decision.bias_gradient:
        wanted.append(bias)
    grad_query, grad_key, grad_value, *rest = torch.autograd.grad(result, wanted, grad_output)
    return grad_query, grad_key, grad_value, rest[0] if rest else None
