"""Forward and backward as the dispatcher calls them: below autograd, each complete in itself.

What the backward needs of its forward is what the caller stashed: output, log-sum-exp, seed and
offset. Both take the caller's tensors in whatever layout, and reach the same decision on them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_mha import attention, config, reference
from cudnn_mha.cache import plans
from cudnn_mha.checks import ALIGNMENT, Reason
from cudnn_mha.dispatch import SPLITTABLE, Decision, Decisions, decide
from cudnn_mha.inputs import (
    Options,
    Parts,
    empty_output,
    outline,
    prepare,
    row_shift,
    split,
    validate,
    without_data,
)

_decisions: Decisions[Decision] = Decisions()


class Arguments(NamedTuple):
    """The arguments of an operator that are not tensors; as for `cudnn_sdpa`.

    ``return_lse`` asks for the log-sum-exp where no gradient is wanted.
    """

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    deterministic: bool = False
    workspace_limit: int | None = None
    return_lse: bool = False


class Gradients(NamedTuple):
    """Gradients in the shapes and layouts of what they belong to; None where none is wanted."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None


class NotServed(Exception):
    """cuDNN does not serve a call; carries every reason."""

    def __init__(self, reasons: tuple[Reason, ...]) -> None:
        super().__init__("; ".join(map(str, reasons)))
        self.reasons = reasons


def describe(query: Tensor, key: Tensor, value: Tensor) -> str:
    """A call in words, for a log line or an error."""
    tensors = {"query": query, "key": key, "value": value}
    return " ".join(f"{name}={tuple(t.shape)}:{t.dtype}" for name, t in tensors.items())


def find(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    arguments: Arguments,
    gradient: bool,
    bias_gradient: bool = False,
    aten: bool = False,
) -> Decision:
    """Who computes a call, decided once for each distinct signature.

    Args:
        query, key, value: ``(B, H, S, D)``, of one batch size; fewer heads mean groups.
        bias: the mask, boolean or additive.
        arguments: the rest of the call.
        gradient: the backward will be wanted, so both directions are served or neither.
        bias_gradient: that of the bias too.
        aten: the output has the layout that PyTorch's own operator gives it.
    """
    signature = (
        query.shape,
        query.stride(),
        query.dtype,
        query.get_device(),
        key.shape,
        key.stride(),
        key.dtype,
        key.get_device(),
        value.shape,
        value.stride(),
        value.dtype,
        value.get_device(),
        (query.data_ptr() | key.data_ptr() | value.data_ptr()) & (ALIGNMENT - 1),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
        arguments,
        gradient,
        bias_gradient,
        aten,
    )
    decision = _decisions.get(signature)
    if decision is None:
        decision = _decide(query, key, value, bias, arguments, gradient, bias_gradient, aten)
        _decisions.keep(signature, decision)
    return decision


def _decide(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    arguments: Arguments,
    gradient: bool,
    bias_gradient: bool,
    aten: bool,
) -> Decision:
    limit = config.parse_bytes(arguments.workspace_limit)
    options = Options(
        dropout_p=arguments.dropout_p,
        is_causal=arguments.is_causal,
        scale=arguments.scale,
        enable_gqa=not query.shape[-3] == key.shape[-3] == value.shape[-3],
        return_lse=arguments.return_lse,
        deterministic=arguments.deterministic,
        workspace_limit=config.settings().workspace_limit if limit is None else limit,
    )
    try:
        if query.dim() != 4 or not query.shape[0] == key.shape[0] == value.shape[0]:
            shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
            raise ValueError(
                f"query, key and value must be (B, H, S, D) with the same B, got {shapes}"
            )
        validate(query, key, value, bias, options)
    except (ValueError, TypeError, RuntimeError) as error:
        if not aten:
            raise
        reason = Reason("arguments", str(error))  # PyTorch's operator has its own words for it
        return Decision(options, outline(query, value, options), reasons=(reason,))
    meta = [without_data(t) for t in (query, key, value)]
    wanted = empty_output(meta[0], value.shape[-1])
    if aten:
        pytorchs = torch.ops.aten._scaled_dot_product_cudnn_attention(*meta, None, False)[0]
        # For a query that is repeated in memory PyTorch infers a layout that it never returns.
        wanted = pytorchs if pytorchs.stride(-1) == 1 else wanted
    decision = decide(
        query,
        key,
        value,
        bias,
        options,
        gradient=gradient,
        bias_gradient=bias_gradient,
        chosen=True,
        output=wanted,
    )
    decision.result_stride = wanted.stride()
    decision.direct = decision.as_is and decision.output_stride == decision.result_stride
    return decision


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    arguments: Arguments,
    gradient: bool,
    bias_gradient: bool = False,
    aten: bool = False,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    depth: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Output, and log-sum-exp ``(B, Hq, Sq, 1)`` if a gradient is or it is wanted, by cuDNN.

    Where a float mask has rows without an entry above -1e4, their log-sum-exp is that of the
    scores less the row's largest entry: of the scores themselves float32 would keep nothing.

    Args:
        query, key, value, bias, arguments, gradient, bias_gradient, aten: as for `find`.
        seed, offset: of the dropout, 0-d int64.
        depth: how often the call was cut in two already.

    Raises:
        NotServed: cuDNN does not serve the call, nor its parts.
    """
    decision = find(query, key, value, bias, arguments, gradient, bias_gradient, aten)
    if decision.forward is not None:
        plans.touch(decision.forward)
        if decision.direct:
            output, lse = attention.forward(decision, query, key, value, None, seed, offset)
            return output, lse if lse is None else lse.contiguous()
        inputs = prepare(query, key, value, bias, decision.options)
        output, lse = attention.forward(decision, *inputs[:4], seed, offset)
        output = in_layout(output[..., : decision.outline.dim_v], decision.result_stride)
        return output, lse if lse is None else lse.contiguous()
    parts = _parts(decision, query, key, value, bias)
    if parts is None:
        raise NotServed(decision.reasons)
    outputs: list[Any] = []
    lses: list[Any] = []
    for number, half in enumerate(parts.halves):
        own = _own_seed(seed, number, depth)
        output, half_lse = forward(
            *half, arguments, gradient, bias_gradient, aten, own, offset, depth + 1
        )
        outputs.append(output)
        lses.append(half_lse)
    output = in_layout(parts.join(outputs), decision.result_stride)
    return output, parts.join(lses) if gradient or arguments.return_lse else None


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    arguments: Arguments,
    bias_gradient: bool = False,
    aten: bool = False,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    depth: int = 0,
) -> Gradients:
    """The gradients from what `forward` left, by cuDNN.

    Raises:
        NotServed: as for `forward`.
    """
    decision = find(query, key, value, bias, arguments, True, bias_gradient, aten)
    if decision.forward is not None:
        return _backward(decision, grad_output, query, key, value, output, lse, bias, seed, offset)
    parts = _parts(decision, query, key, value, bias)
    if parts is None:
        raise NotServed(decision.reasons)
    stashed = [parts.cut(t) for t in (grad_output, output, lse)]
    found: list[Any] = []
    for number, half in enumerate(parts.halves):
        grad, out, own_lse = (pair[number] for pair in stashed)
        result = backward(
            grad,
            *half[:3],
            out,
            own_lse,
            half[3],
            arguments,
            bias_gradient,
            aten,
            _own_seed(seed, number, depth),
            offset,
            depth + 1,
        )
        found.append(result)
    grads = [
        gradient_of(tensor, parts.join_gradients(tensor, [half[number] for half in found]))
        for number, tensor in enumerate((query, key, value))
    ]
    masks = [half.bias for half in found if half.bias is not None]
    grad_bias = parts.join_gradients(bias, masks) if bias is not None and masks else None
    return Gradients(grads[0], grads[1], grads[2], grad_bias)


def _parts(
    decision: Decision, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> Parts | None:
    """The call in two, if being too large is all that keeps cuDNN from it."""
    if not SPLITTABLE.issuperset(reason.rule for reason in decision.reasons):
        return None
    return split(query, key, value, bias)


def _own_seed(seed: Tensor | None, number: int, depth: int) -> Tensor | None:
    """Another seed for every part, so that no two drop the same weights."""
    return seed if seed is None or number == 0 else seed + (number << depth)


def _backward(
    decision: Decision,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
) -> Gradients:
    prepared: tuple[Tensor, Tensor, Tensor, Tensor | None] = (query, key, value, None)
    if not decision.as_is:
        prepared = prepare(query, key, value, bias, decision.options)[:4]
        missing = prepared[2].shape[-1] - output.shape[-1]
        if missing:
            output, grad_output = (F.pad(t, (0, missing)) for t in (output, grad_output))
    stride = decision.output_stride
    if output.stride() != stride or output.data_ptr() % ALIGNMENT:
        output = output.new_empty_strided(output.shape, stride).copy_(output)
    found = attention.backward(
        decision, grad_output, *prepared, output, lse.contiguous(), seed, offset
    )
    if decision.like_inputs:
        return Gradients(*found)
    grad_query, grad_bias = found[0], found[3]
    scale = decision.options.scale
    if scale is not None and scale <= 0:  # the query was multiplied by this
        grad_query = grad_query * math.copysign(scale != 0, scale)
    return Gradients(
        gradient_of(query, grad_query),
        gradient_of(key, found[1]),
        gradient_of(value, found[2]),
        None if grad_bias is None or bias is None else reduced(grad_bias, bias),
    )


def in_layout(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The tensor itself, or a copy where it has other strides."""
    if tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def gradient_of(tensor: Tensor, gradient: Tensor) -> Tensor:
    """Its gradient in the layout of ``empty_like(tensor)``, without the padding of D."""
    gradient = gradient[..., : tensor.shape[-1]]
    result = torch.empty_like(tensor)
    return gradient if gradient.stride() == result.stride() else result.copy_(gradient)


def reduced(gradient: Tensor, mask: Tensor) -> Tensor:
    """The gradient of a bias as the gradient of the mask that was broadcast to it."""
    expanded = mask[(None,) * (4 - mask.dim())]
    own = tuple(
        1 if stride == 0 else size
        for size, stride in zip(expanded.shape, expanded.stride(), strict=True)
    )
    summed = gradient.sum_to_size(own).to(mask.dtype)
    if own == expanded.shape:
        return summed.reshape(mask.shape)
    # The entries of an expanded dimension are one in memory: the first stands for all of them.
    result = summed.new_zeros(expanded.shape)
    result[tuple(slice(0, size) for size in own)] = summed
    return result.reshape(mask.shape)


def reference_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    arguments: Arguments,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `forward` by plain PyTorch, on any device."""
    shifted = shifted_mask(bias)
    output, lse = reference.attention(
        query,
        key,
        value,
        shifted,
        arguments.dropout_p,
        arguments.is_causal,
        arguments.scale,
        dropout_mask=kept_weights(query, key, arguments.dropout_p, seed),
    )
    output = empty_output(query, value.shape[-1]).copy_(output)
    return output, lse.float().unsqueeze(-1)


def reference_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    arguments: Arguments,
    seed: Tensor | None = None,
    *,
    bias_gradient: bool = False,
) -> Gradients:
    """The same as `backward` by plain PyTorch, on any device."""
    shifted = shifted_mask(bias)
    *found, scores = reference.gradients(
        grad_output,
        query,
        key,
        value,
        output,
        lse.squeeze(-1),
        shifted,
        arguments.dropout_p,
        arguments.is_causal,
        arguments.scale,
        dropout_mask=kept_weights(query, key, arguments.dropout_p, seed),
    )
    grads = [torch.empty_like(t).copy_(g) for t, g in zip((query, key, value), found, strict=True)]
    grad_bias = reduced(scores, bias) if bias_gradient and bias is not None else None
    return Gradients(grads[0], grads[1], grads[2], grad_bias)


def shifted_mask(bias: Tensor | None) -> Tensor | None:
    """The mask as the log-sum-exp has it."""
    if bias is None or bias.dtype == torch.bool:
        return bias
    bias = bias.float()
    return bias - row_shift(bias)


def kept_weights(
    query: Tensor, key: Tensor, dropout_p: float, seed: Tensor | None
) -> Tensor | None:
    """The weights that dropout keeps, drawn from the seed: the same for forward and backward."""
    if not dropout_p:
        return None
    assert seed is not None
    generator = torch.Generator(query.device).manual_seed(int(seed))
    shape = (*query.shape[:-1], key.shape[-2])
    return torch.rand(shape, generator=generator, device=query.device) >= dropout_p
