"""`cudnn_sdpa`: scaled dot-product attention through cuDNN, for PyTorch tensors."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from cudnn_mha import config, ops, padded, runtime, traced
from cudnn_mha.attention import apply, attend, forward
from cudnn_mha.cache import plans
from cudnn_mha.checks import ALIGNMENT, Kind, Reason
from cudnn_mha.dispatch import (
    SPLITTABLE,
    Decision,
    Decisions,
    compute,
    decide,
    fall_back,
    not_for_cudnn,
)
from cudnn_mha.inputs import (
    Inputs,
    Numbers,
    Options,
    Parts,
    autocast,
    four_dimensional,
    is_half,
    make_options,
    outline,
    prepare,
    require_tensors,
    row_shift,
    split,
    validate,
)
from cudnn_mha.routes import Given
from cudnn_mha.score_mod import ScoreMod, trace
from cudnn_mha.terms import Wishes, make_terms

_PLAIN = {Tensor, Parameter}
_decisions: Decisions[Decision] = Decisions()

# What every call asks PyTorch, without the way through its modules, which are large and cold.
_is_compiling = torch.compiler.is_compiling
_is_autocast_enabled = torch._C._is_any_autocast_enabled
_is_deterministic = torch._C._get_deterministic_algorithms
_is_grad_enabled = torch.is_grad_enabled
_are_transforms_active = torch._C._are_functorch_transforms_active
_is_cudnn_enabled = torch._C._get_cudnn_sdp_enabled

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
    seq_lens_q: Tensor | None = ...,
    seq_lens_kv: Tensor | None = ...,
    causal_alignment: str = ...,
    window: tuple[int, int] | None = ...,
    alibi: bool = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
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
    seq_lens_q: Tensor | None = ...,
    seq_lens_kv: Tensor | None = ...,
    causal_alignment: str = ...,
    window: tuple[int, int] | None = ...,
    alibi: bool = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
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
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    causal_alignment: str = "top_left",
    window: tuple[int, int] | None = None,
    alibi: bool = False,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
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
            are no multiple of 8 are padded with zeros, which is exact. Of a ``DTensor`` batch and
            heads may be sharded; beside it there are only the arguments of PyTorch's function,
            ``return_lse``, ``deterministic``, ``workspace_limit`` and ``fallback``.
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
            ``(B, Hq, Sq)``; -inf for a row that masks everything. Differentiable: cuDNN computes
            its gradient by a backward whose value has 16 more dimensions, and raises where there
            is none. Where it may need one, it breaks the graph of code compiled for a GPU.
        deterministic: True asks for gradients that are bit-equal on every run; None follows
            ``torch.use_deterministic_algorithms``.
        workspace_limit: most bytes of scratch device memory, or a text such as ``'64MiB'``; plans
            that need more are not used. Default: ``TORCH_CUDNN_MHA_WORKSPACE_LIMIT``, else none.
        fallback: False raises where cuDNN does not serve the call.
        seq_lens_q: ``(B,)`` integers on the device: how many of the first rows of each sequence's
            query are real; the rest is padding. Output and gradients of padding are zeros, its
            log-sum-exp is -inf, and it may hold anything, NaN too. Values are clamped to
            ``[0, Sq]``; nothing is read back to the host.
        seq_lens_kv: likewise for key and value, ``[0, Skv]``.
        causal_alignment: where the diagonal of ``is_causal``, ``window`` and ALiBi lies:
            ``"top_left"``, from the first query and key, or ``"bottom_right"``, through the last
            ones, of each sequence where lengths are given. With ``"bottom_right"`` the distance
            is ``d = i - j + Skv - Sq``, else ``d = i - j``.
        window: ``(left, right)``: query i sees key j where ``-right <= d <= left``, as
            FlashAttention counts; -1 stands for no bound. Together with ``is_causal`` right is 0.
        alibi: adds ``-slope * |d|`` to the scores, with the slopes of Press et al., "Train Short,
            Test Long" (2022).
        alibi_slopes: ``(Hq,)`` slopes in place of those; they have no gradient.
        softcap: turns scores s into ``softcap * tanh(s / softcap)`` before every mask, as Gemma 2
            does. None or 0 for none.
        sinks: ``(Hq,)`` one logit for each head that takes part in softmax and log-sum-exp but
            has no key, as in gpt-oss. May require a gradient.
        score_mod: a function ``(score, q_index, kv_index)`` that returns the new score, for what
            no other argument says; see below.

    A ``score_mod`` gets the scores times ``scale``, before soft cap, ALiBi, masks and sinks, and
    the positions of query and key, counted from 0 whatever ``causal_alignment`` is. Its gradient
    is derived. A soft cap, and a bias that grows with the logarithm of the distance, are ::

        def cap(score, q_index, kv_index):
            return 50.0 * torch.tanh(score / 50.0)

        def nearby(score, q_index, kv_index):
            return score - 0.5 * torch.log(1 + abs(q_index - kv_index))

    It may use ``+ - * /`` with numbers and between values, ``abs``, and ``torch.tanh``,
    ``sigmoid``, ``exp``, ``log``, ``sqrt``, ``abs``, ``maximum``, ``minimum`` and ``clamp``, 32
    operations at most. It is called once for every call, with symbols: no comparison, no ``if`` on
    a value, no tensor. What it builds, numbers included, is compiled into the plan, so functions
    that build the same share one, and a number that changes with every step costs a plan each
    time. The result and its derivative have to be finite where keys are hidden, too. It breaks the
    graph of compiled code.

    Returns:
        ``(B, Hq, Sq, Dv)`` in the memory order of query; with ``return_lse`` the pair of it and
        the log-sum-exp.

    Raises:
        CudnnSdpaUnsupportedError: ``fallback`` is False and cuDNN does not serve the call; it
            carries every reason.
        ValueError, TypeError: arguments that mean nothing; the message names the argument.
        RuntimeError: both ``attn_mask`` and ``is_causal``, or tensors on several devices.
    """
    ordinary = (
        seq_lens_q is None
        and seq_lens_kv is None
        and (window is None or window == (-1, -1))
        and alibi_slopes is None
        and (softcap is None or softcap == 0)
        and sinks is None
        and score_mod is None
        and alibi is False
        and causal_alignment == "top_left"
    )
    if not ordinary:
        tensors = (query, key, value, attn_mask, seq_lens_q, seq_lens_kv, alibi_slopes, sinks)
        numbers = (
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            return_lse,
            deterministic,
            workspace_limit,
            fallback,
        )
        wishes = (causal_alignment, window, softcap, alibi)
        if score_mod is None and traced.applies(tensors, return_lse):
            return traced.padded_call(tensors, numbers, wishes)
        return _extended(tensors, numbers, wishes, score_mod)
    if _is_compiling():
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
    if _is_autocast_enabled():
        query, key, value = (autocast(t) for t in (query, key, value))
    if deterministic is None:
        deterministic = _is_deterministic()
    gradient = _is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    )
    signature = None
    # Subclasses and functorch's wrappers have no memory of their own to look at.
    if plain and query.is_cuda and not _are_transforms_active():
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
            _is_cudnn_enabled(),
        )
        decision = _decisions.get(signature)
        if decision is not None:
            return _decided(decision, query, key, value, attn_mask)
    options = make_options(
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        return_lse,
        deterministic,
        workspace_limit,
        fallback,
    )
    if not plain and any(map(runtime.is_distributed, (query, key, value, attn_mask))):
        return _by_operators(query, key, value, attn_mask, options)
    validate(query, key, value, attn_mask, options)
    return _first_call(query, key, value, attn_mask, options, gradient, signature)


@runtime.not_traced
def _extended(
    tensors: tuple[Any, ...], numbers: Numbers, wishes: Wishes, score_mod: ScoreMod | None
) -> Tensor | tuple[Tensor, Tensor]:
    """A call with arguments that PyTorch's function does not have; compilers leave it as it is."""
    options = make_options(*numbers)
    terms = make_terms(options.is_causal, *wishes, trace(score_mod))
    return padded.compute(Given(*tensors), options, terms)


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
    tensors = (query, key, value, mask)
    local = _for_the_operators(query) and not runtime.is_distributed(query)
    if return_lse and local and traced.wants_gradient(tensors):
        # The operators' log-sum-exp has no gradient, so the graph breaks here.
        numbers = (
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            return_lse,
            deterministic,
            workspace_limit,
            fallback,
        )
        none = (None,) * 4
        return _extended((*tensors, *none), numbers, ("top_left", None, None, False), None)
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
    return _by_operators(query, key, value, mask, options)


def _by_operators(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options
) -> Tensor | tuple[Tensor, Tensor]:
    """The call of tensors that only PyTorch's dispatcher sees through."""
    query, key, value = (autocast(t) for t in (query, key, value))
    validate(query, key, value, mask, options)
    gradient = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (mask is not None and mask.requires_grad)
    )
    if not _for_the_operators(query):
        if not options.fallback:
            ops.refuse_compiled()
        return _result(options, compute(query, key, value, mask, options, gradient=gradient))
    given = {
        "scale": options.scale,
        "deterministic": options.deterministic,
        "workspace_limit": options.workspace_limit,
        "fallback": options.fallback,
    }
    q, k, v = four_dimensional(query, key, value, options)
    call = (q, k, v, mask, options.dropout_p, options.is_causal)
    if not gradient and not options.return_lse:
        output: Tensor = ops.sdpa_inference(*call, **given)
        return output[0] if query.dim() == 3 else output
    bias_gradient = mask is not None and mask.requires_grad and gradient
    output, lse, *_ = ops.sdpa_forward(*call, bias_gradient=bias_gradient, **given)
    lse = lse.squeeze(-1)
    if mask is not None and mask.dtype != torch.bool:
        lse = (lse + row_shift(mask).squeeze(-1)).float()
    if query.dim() == 3:
        output, lse = output[0], lse[0]
    return (output, lse) if options.return_lse else output


def _for_the_operators(query: Tensor) -> bool:
    """Whether the operators take a call; what they do not stays with PyTorch's own function."""
    sharded_on_cpu = not query.is_cuda and runtime.is_distributed(query)
    return (
        query.dim() in (3, 4)
        and (sharded_on_cpu or (query.is_cuda and is_half(query.dtype)))
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
        if decision.bare_but_gradient:
            return apply(query, key, value, None, None, None, decision)  # type: ignore[no-any-return]
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
        decision.reasons = (not_for_cudnn(query),)
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
