"""`cudnn_sdpa`: scaled dot-product attention through cuDNN, for PyTorch tensors."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from cudnn_mha import config, ops
from cudnn_mha.attention import attend, forward
from cudnn_mha.cache import plans
from cudnn_mha.checks import ALIGNMENT, Kind, Reason
from cudnn_mha.dispatch import (
    SPLITTABLE,
    Decision,
    Decisions,
    compute,
    decide,
    fall_back,
    not_on_cuda,
)
from cudnn_mha.errors import CudnnSdpaUnsupportedError
from cudnn_mha.inputs import (
    Inputs,
    Options,
    Parts,
    four_dimensional,
    is_half,
    outline,
    prepare,
    require_kinds,
    require_tensors,
    row_shift,
    split,
    validate,
)

_PLAIN = {Tensor, Parameter}
_decisions = Decisions()

with contextlib.suppress(ValueError):  # the first call says what is wrong
    config.settings()


@overload
def cudnn_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    workspace_limit: int | str | None = ...,
    fallback: bool = ...,
) -> Tensor: ...


@overload
def cudnn_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    workspace_limit: int | str | None = ...,
    fallback: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def cudnn_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    deterministic: bool | None = None,
    workspace_limit: int | str | None = None,
    fallback: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scaled dot-product attention, computed by cuDNN.

    .. math:: \mathrm{softmax}(\mathrm{scale} \cdot Q K^T + \mathrm{mask}) V

    The signature and the conventions are those of
    ``torch.nn.functional.scaled_dot_product_attention``; what follows the ``*`` is added. Where
    cuDNN does not serve a call, PyTorch computes it and the ``cudnn_mha`` logger says why, once
    for each distinct cause; `explain` tells beforehand.

    Args:
        query: ``(B, Hq, Sq, Dqk)`` or ``(Hq, Sq, Dqk)``, float16 or bfloat16 on a CUDA device, in
            any memory layout. Nothing is copied unless cuDNN cannot address it: last stride not
            1, or base address or another stride no multiple of 16 bytes. Head dimensions that
            are no multiple of 8 are padded with zeros, which is exact.
        key: ``(B, Hk, Skv, Dqk)``.
        value: ``(B, Hv, Skv, Dv)``.
        attn_mask: boolean (True: attend) or additive (float32, float16 or bfloat16, whatever the
            dtype of query), of any shape that broadcasts to ``(B, Hq, Sq, Skv)``. A row that
            masks everything gives zeros. A float mask may require a gradient.
        dropout_p: probability that an attention weight is dropped, drawn from PyTorch's CUDA
            generator. Applied whenever it is above 0, as PyTorch's function does.
        is_causal: query i sees key j where j <= i (top-left alignment, also for Sq != Skv).
        scale: factor on the scores; default ``1/sqrt(Dqk)``.
        enable_gqa: Hk and Hv may be divisors of Hq, and may differ: query head h uses key head
            ``h // (Hq // Hk)``.
        return_lse: also return the log-sum-exp of each row's scores, natural logarithm, float32,
            ``(B, Hq, Sq)``; -inf for a row that masks everything. It has no gradient.
        deterministic: True asks for gradients that are bit-equal on every run; None follows
            ``torch.use_deterministic_algorithms``.
        workspace_limit: most bytes of scratch device memory, or a text such as ``'64MiB'``; plans
            that need more are not used. Default: ``TORCH_CUDNN_MHA_WORKSPACE_LIMIT``, else none.
        fallback: False raises where cuDNN does not serve the call.

    Returns:
        ``(B, Hq, Sq, Dv)`` in the memory order of query; with ``return_lse`` the pair of it and
        the log-sum-exp.

    Raises:
        CudnnSdpaUnsupportedError: ``fallback`` is False and cuDNN does not serve the call; it
            carries every reason.
        ValueError, TypeError: arguments that mean nothing; the message names the argument.
        RuntimeError: both ``attn_mask`` and ``is_causal``, or tensors on several devices.
    """
    if torch.compiler.is_compiling():
        return _traced(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            return_lse,
            deterministic,
            workspace_limit,
            fallback,
        )
    plain = (
        type(query) in _PLAIN
        and type(key) in _PLAIN
        and type(value) in _PLAIN
        and (attn_mask is None or type(attn_mask) in _PLAIN)
    )
    if not plain:
        require_tensors(query, key, value, attn_mask)
    if torch._C._is_any_autocast_enabled():
        query, key, value = (_autocast(t) for t in (query, key, value))
    if deterministic is None:
        deterministic = torch._C._get_deterministic_algorithms()
    gradient = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    )
    signature = None
    # Subclasses and functorch's wrappers have no memory of their own to look at.
    if plain and query.is_cuda and not torch._C._are_functorch_transforms_active():
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
            None if attn_mask is None else _mask_signature(attn_mask),
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            gradient,
            return_lse,
            deterministic,
            workspace_limit,
            fallback,
            torch._C._get_cudnn_sdp_enabled(),
        )
        decision = _decisions.get(signature)
        if decision is not None:
            return _decided(decision, query, key, value, attn_mask)
    require_kinds(dropout_p, is_causal, scale, enable_gqa, return_lse, deterministic, fallback)
    if workspace_limit is None:
        workspace_limit = config.settings().workspace_limit
    options = Options(
        float(dropout_p),
        is_causal,
        None if scale is None else float(scale),
        enable_gqa,
        return_lse,
        deterministic,
        config.parse_bytes(workspace_limit),
        fallback,
    )
    validate(query, key, value, attn_mask, options)
    return _first_call(query, key, value, attn_mask, options, gradient, signature)


def _traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    deterministic: bool | None,
    workspace_limit: int | str | None,
    fallback: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The call as a compiler sees it: addresses and plans mean nothing to it, operators do."""
    query, key, value = (_autocast(t) for t in (query, key, value))
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = Options(
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        return_lse,
        deterministic,
        config.parse_bytes(workspace_limit),
        fallback,
    )
    validate(query, key, value, mask, options)
    gradient = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (mask is not None and mask.requires_grad)
    )
    if not _for_the_operators(query):
        if not fallback:
            _refuse_compiled()
        return _result(options, compute(query, key, value, mask, options, gradient=gradient))
    given = {
        "scale": scale,
        "deterministic": deterministic,
        "workspace_limit": options.workspace_limit,
        "fallback": fallback,
    }
    q, k, v = four_dimensional(query, key, value, options)
    call = (q, k, v, mask, dropout_p, is_causal)
    if not gradient and not return_lse:
        output: Tensor = ops.sdpa_inference(*call, **given)
        return output[0] if query.dim() == 3 else output
    bias_gradient = mask is not None and mask.requires_grad and gradient
    output, lse, *_ = ops.sdpa_forward(*call, bias_gradient=bias_gradient, **given)
    lse = lse.squeeze(-1)
    if mask is not None and mask.dtype != torch.bool:
        lse = lse + row_shift(mask).squeeze(-1)
    if query.dim() == 3:
        output, lse = output[0], lse[0]
    return (output, lse) if return_lse else output


@_disable_dynamo
def _refuse_compiled() -> NoReturn:
    """Raises out of compiled code, which knows no exceptions of others."""
    message = (
        "a compiled call must have float16 or bfloat16 tensors of 3 or 4 dimensions on a CUDA "
        "device, and cuDNN allowed; call it outside of the compiler for every reason"
    )
    raise CudnnSdpaUnsupportedError("a compiled call", (Reason("compiled", message),))


def _for_the_operators(query: Tensor) -> bool:
    """Whether a traced call may be cuDNN's; what is not stays with PyTorch's own compilation."""
    return (
        query.is_cuda
        and query.dim() in (3, 4)
        and is_half(query.dtype)
        and not (config.current is not None and config.current.disabled)
        and torch._C._get_cudnn_sdp_enabled()
        and not torch._C._are_functorch_transforms_active()
    )


def _decided(
    decision: Decision, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    """The call of a signature that is decided."""
    if decision.forward is None:
        result = fall_back(query, key, value, mask, decision, decision.reasons)
        return _result(decision.options, result)
    plans.touch(decision.forward)
    try:
        if decision.bare:
            return forward(decision, query, key, value)[0]
        if decision.as_is:
            inputs = Inputs(query, key, value, None, None)
        else:
            inputs = prepare(query, key, value, mask, decision.options)
        result = attend(decision, inputs)
    except torch.OutOfMemoryError as error:
        reason = Reason("memory", f"not enough memory for cuDNN: {error}", Kind.UNAVAILABLE)
        result = fall_back(query, key, value, mask, decision, (reason,))
    return _result(decision.options, result)


def _result(
    options: Options, result: tuple[Tensor, Tensor | None]
) -> Tensor | tuple[Tensor, Tensor]:
    output, lse = result
    if not options.return_lse:
        return output
    assert lse is not None
    return output, lse


def _first_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: Options,
    gradient: bool,
    signature: tuple[Any, ...] | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The call of a signature that is not decided yet; its tensors are valid."""
    if signature is None or 0 in (*query.shape, *key.shape, *value.shape):
        # Not cuDNN's: no GPU, nothing to compute, or tensors without plain memory.
        decision = Decision(options, outline(query, value, options), gradient=gradient)
        decision.reasons = (_not_for_cudnn(query),)
        if query.numel() and not options.fallback:
            return _result(
                decision.options, fall_back(query, key, value, mask, decision, decision.reasons)
            )
        return _result(
            decision.options, compute(query, key, value, mask, options, gradient=gradient)
        )
    decision = decide(query, key, value, mask, options, gradient=gradient)
    if decision.reasons and SPLITTABLE.issuperset(r.rule for r in decision.reasons):
        parts = split(query, key, value, mask)
        if parts is not None:
            return _in_parts(parts, options)
    _decisions.keep(signature, decision)
    return _decided(decision, query, key, value, mask)


def _not_for_cudnn(query: Tensor) -> Reason:
    if not query.is_cuda:
        return not_on_cuda(query)
    return Reason(
        "tensor_type",
        "the tensors must be plain tensors outside of functorch transforms, got "
        f"{type(query).__name__}",
    )


def _in_parts(parts: Parts, options: Options) -> Tensor | tuple[Tensor, Tensor]:
    """A call too large for one launch, computed in two halves, each of them perhaps split too."""
    results = [
        cudnn_sdpa(
            *half,
            options.dropout_p,
            options.is_causal,
            options.scale,
            options.enable_gqa,
            return_lse=options.return_lse,  # type: ignore[call-overload]
            deterministic=options.deterministic,
            workspace_limit=options.workspace_limit,
            fallback=options.fallback,
        )
        for half in parts.halves
    ]
    if not options.return_lse:
        return parts.join(results)
    outputs, lses = zip(*results, strict=True)
    return parts.join(list(outputs)), parts.join(list(lses))


def _mask_signature(mask: Tensor) -> tuple[Any, ...]:
    return (mask.shape, mask.stride(), mask.dtype, mask.get_device(), mask.requires_grad)


def _autocast(tensor: Tensor) -> Tensor:
    """What ``torch.autocast`` does to the arguments of PyTorch's attention."""
    kind = tensor.device.type
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    if eligible and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor
