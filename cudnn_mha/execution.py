"""Runs the plans of a route, and ties the backward to autograd.

What a plan is given is gathered in one map from `Uid` to tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from cudnn_mha import (
    attention,
    dispatch,
    lse_gradient,
)
from cudnn_mha.cache import Slot, plans
from cudnn_mha.graph_builder import Uid
from cudnn_mha.inputs import (
    Inputs,
    addressable,
)
from cudnn_mha.padding import zero_gaps, zero_padding
from cudnn_mha.plan import Plan
from cudnn_mha.routes import Manner, Route
from cudnn_mha.sequences import OFFSETS, Operands
from cudnn_mha.spec import AttentionSpec, TensorSpec


def run_plans(
    inputs: Inputs,
    sinks: Tensor | None,
    output: TensorSpec,
    operands: Operands,
    route: Route,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp of tensors that a route's plans can address, with their gradients.

    Args:
        inputs: query, key, value and bias.
        sinks: ``(Hq,)`` float32; the plans are not told of them where they are applied later.
        output: layout of the output.
        operands: what else the plans are told.
        route: whose plans.
        gradient: gradients are wanted.
    """
    if route.sinks_after:
        sinks = None
    if gradient:
        result: tuple[Tensor, Tensor] = _Attention.apply(
            *inputs[:4], sinks, output, operands, route
        )
        return result
    return _forward(*inputs[:4], sinks, output, operands, route)


def _execute(slot: Slot, operands: Operands) -> None:
    plans.touch(slot)
    plan: Plan = slot.plan  # type: ignore[assignment]
    attention.run(plan, [operands[uid].data_ptr() for uid in plan.takes])


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    layout: TensorSpec,
    operands: Operands,
    route: Route,
) -> tuple[Tensor, Tensor | None]:
    assert route.forward is not None and route.forward.plan is not None
    partial = route.manner is Manner.RAGGED
    output = query.new_empty_strided(layout.shape, layout.stride)
    if partial:
        _zero_rest(output, Uid.OUTPUT, route, operands)
    tensors: Operands = {Uid.QUERY: query, Uid.KEY: key, Uid.VALUE: value, Uid.OUTPUT: output}
    if bias is not None:
        tensors[Uid.BIAS] = bias
    if sinks is not None:
        tensors[Uid.SINKS] = sinks
    lse = None
    if route.forward.plan.spec.lse:
        lse = _empty_lse(output, by_token=partial)
        tensors[Uid.LSE] = lse
    _execute(route.forward, operands | tensors)
    return output, lse


def _zero_rest(tensor: Tensor, uid: Uid, route: Route, operands: Operands) -> None:
    """Zeros in the rows of an output that a ragged kernel does not write."""
    lengths = operands[Uid.SEQ_LEN_Q], operands[Uid.SEQ_LEN_KV]
    own, other = lengths if uid in (Uid.OUTPUT, Uid.GRAD_QUERY) else lengths[::-1]
    if route.packed:
        zero_gaps(tensor, operands[Uid[f"OFFSET_{uid.name}"]], own, other)
    else:
        zero_padding(tensor, own, other)


def _empty_lse(output: Tensor, *, by_token: bool) -> Tensor:
    """``(B, H, S)``, or ``(H, tokens)`` of a packed output."""
    if not by_token:
        return output.new_empty(output.shape[:-1], dtype=torch.float32)
    if output.dim() == 3:
        return output.new_full(output.shape[:-1], -torch.inf, dtype=torch.float32).mT
    batch, heads, seq, _ = output.shape
    rows = output.new_full((batch, seq, heads), -torch.inf, dtype=torch.float32)
    return rows.transpose(1, 2)


class _Attention(torch.autograd.Function):
    """Stashes the tensors, the output, the log-sum-exp, and what the plans were told."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        layout: TensorSpec,
        operands: Operands,
        route: Route,
    ) -> tuple[Tensor, Tensor]:
        output, lse = _forward(query, key, value, bias, sinks, layout, operands, route)
        assert lse is not None
        ctx.save_for_backward(query, key, value, bias, sinks, output, lse, *operands.values())
        ctx.operands = tuple(operands)
        ctx.route = route
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> Any:
        attention.refuse_second_order()
        query, key, value, bias, sinks, output, lse, *rest = ctx.saved_tensors
        saved = query, key, value, bias, sinks, output, lse
        operands = dict(zip(ctx.operands, rest, strict=True))
        if grad_lse is not None:
            gradients = _through_lse(ctx.route, grad_output, grad_lse, *saved, operands)
        elif grad_output is not None:
            gradients = run_backward(ctx.route, grad_output, *saved, operands)
        else:
            return (None,) * 8
        return (*gradients, None, None, None)


Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Those of query, key, value, bias and sinks."""


def _through_lse(
    route: Route,
    grad_output: Tensor | None,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    output: Tensor,
    lse: Tensor,
    operands: Operands,
) -> Gradients:
    """The gradients where the log-sum-exp has one too; see `lse_gradient`."""
    wide = _widened(route)
    assert wide.spec is not None
    dim = value.shape[-1]
    rows, grad_rows = (t.mT if route.packed else t for t in (lse, grad_lse))
    value, output, grad_output = lse_gradient.widen(
        wide.spec, value, output, rows, grad_output, grad_rows
    )
    operands = operands | _widened_offsets(route, wide, operands)
    grad_query, grad_key, grad_value, grad_bias, grad_sinks = run_backward(
        wide, grad_output, query, key, value, bias, sinks, output, lse, operands
    )
    return grad_query, grad_key, grad_value[..., :dim], grad_bias, grad_sinks


def widened_graph(route: Route) -> tuple[AttentionSpec, AttentionSpec]:
    """The backward that takes a gradient of the log-sum-exp: its tensors, and its graph."""
    assert route.spec is not None and route.told is not None
    spec = lse_gradient.widened(route.spec)
    return spec, route.told(spec)


def _widened(route: Route) -> Route:
    """The route whose backward takes a gradient of the log-sum-exp; see `lse_gradient`."""
    if route.wide is None:
        assert route.device is not None
        spec, graph = widened_graph(route)
        slot, reasons = dispatch.check_and_find(graph, route.device, route.options.workspace_limit)
        if slot is None:
            raise lse_gradient.no_gradient(reasons)
        route.wide = dataclasses.replace(route, spec=spec, graphs=(graph,), backward=slot)
    return route.wide


def _widened_offsets(narrow: Route, wide: Route, operands: Operands) -> Operands:
    """Where sequences lie in the tensors that were widened."""
    unit = 2 if narrow.packed else 0  # packed sequences lie so many tokens apart, others batches
    found: Operands = {}
    for uid, name in OFFSETS.items():
        if uid in operands:
            old, new = (getattr(r.spec, name).stride[unit] for r in (narrow, wide))
            found[uid] = operands[uid] if old == new else operands[uid] // old * new
    return found


def run_backward(
    route: Route,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    output: Tensor,
    lse: Tensor,
    operands: Operands,
) -> Gradients:
    """The gradients that a route's backward plan computes."""
    assert route.spec is not None and route.backward is not None
    spec = route.spec
    partial = route.manner is Manner.RAGGED
    if grad_output.stride() != output.stride() or not addressable(grad_output):
        grad_output = torch.empty_like(output).copy_(grad_output)
    if bias is not None or spec.modified:
        # Weights exp(score - lse) of a row without keys: exp(-inf), not exp(-inf + inf).
        lse = lse.clone().masked_fill_(lse == -torch.inf, torch.inf)  # in its own layout
    tensors: Operands = {
        Uid.QUERY: query,
        Uid.KEY: key,
        Uid.VALUE: value,
        Uid.OUTPUT: output,
        Uid.LSE: lse,
        Uid.GRAD_OUTPUT: grad_output,
    }
    layouts = (spec.grad_query, spec.grad_key, spec.grad_value)
    uids = (Uid.GRAD_QUERY, Uid.GRAD_KEY, Uid.GRAD_VALUE)
    for uid, layout, tensor in zip(uids, layouts, (query, key, value), strict=True):
        if route.packed:
            tensors[uid] = tensor.new_empty(tensor.shape)
        else:
            tensors[uid] = _gradient(layout, query)
        if partial:
            _zero_rest(tensors[uid], uid, route, operands)
    if bias is not None:
        tensors[Uid.BIAS] = bias
    if spec.grad_bias is not None:
        tensors[Uid.GRAD_BIAS] = _gradient(spec.grad_bias, query).zero_()
    if sinks is not None:
        tensors[Uid.SINKS] = sinks
        if spec.grad_sinks:
            tensors[Uid.GRAD_SINKS] = torch.zeros_like(sinks)
    _execute(route.backward, operands | tensors)
    grad_bias = tensors.get(Uid.GRAD_BIAS)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return (
        *(tensors[uid] for uid in uids),  # type: ignore[return-value]
        grad_bias,
        tensors.get(Uid.GRAD_SINKS),
    )


def _gradient(layout: TensorSpec | None, like: Tensor) -> Tensor:
    assert layout is not None
    return like.new_empty_strided(layout.shape, layout.stride)


def apply_sinks(
    output: Tensor, lse: Tensor, sinks: Tensor, lengths_q: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp ``(B, H, S)`` of one that knew of no sinks, with them."""
    sinks = sinks[:, None]
    share = torch.sigmoid(lse - sinks)  # what the keys keep: exp(lse) / (exp(lse) + exp(sink))
    total = torch.logaddexp(lse, sinks)
    if lengths_q is not None:
        index = torch.arange(lse.shape[2], device=lse.device)
        total = total.masked_fill((index >= lengths_q[:, None])[:, None], -torch.inf)
    return (output * share[..., None]).to(output.dtype), total


def with_sinks_alone(
    lse: Tensor, sinks: Tensor, lengths_q: Tensor | None, lengths_kv: Tensor
) -> Tensor:
    """The log-sum-exp ``(B, H, S)`` of sequences without keys: the sink is all that is summed."""
    alone = (lengths_kv <= 0)[:, None]
    if lengths_q is not None:
        index = torch.arange(lse.shape[2], device=lse.device)
        alone = alone & (index < lengths_q[:, None])
    return torch.where(alone[:, None], sinks[:, None], lse)
