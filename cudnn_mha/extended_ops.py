"""The operators of calls that `F.scaled_dot_product_attention` cannot say, as compilers see them.

===================================================  =============================================
``torch.ops.cudnn_mha.sdpa_padded_forward``          output, and what the backward needs of it
``torch.ops.cudnn_mha.sdpa_padded_backward``         the gradients, from what the forward returned
``torch.ops.cudnn_mha.sdpa_padded_inference``        output, and the log-sum-exp if it is asked for
``torch.ops.cudnn_mha.sdpa_varlen_forward``          the same three for packed sequences
``torch.ops.cudnn_mha.sdpa_varlen_backward``
``torch.ops.cudnn_mha.sdpa_varlen_inference``
``torch.ops.cudnn_mha.sdpa_paged``                   keys and values in pages; inference alone
===================================================  =============================================

`cudnn_sdpa`, `cudnn_sdpa_varlen` and `cudnn_sdpa_paged` become these where a compiler looks on (see
`cudnn_mha.traced`). Arguments mean what they mean there and have the same names and defaults;
``attn_mask`` is ``attn_bias``. Padded tensors are ``(B, H, S, D)`` of one batch size, pages
``(pages, H, page size, D)``.

Stashed for a backward are ``output``; ``logsumexp``, float32, natural logarithm, ``(B, Hq, Sq)``
or packed ``(Hq, Tq)``; ``philox_seed`` and ``philox_offset``, 0-d int64, empty where there is no
dropout. Without sinks this log-sum-exp of a row whose float mask has no entry above -1e4 is that
of the scores less the row's largest entry; that of an operator for inference is of the scores
themselves. Neither has a gradient. Where cuDNN does not serve a call the operators compute it by
plain PyTorch, on any device; with ``fallback=False`` they raise `CudnnSdpaUnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cudnn_mha import config, packed, packed_kernels, padded, padded_kernels, paged
from cudnn_mha.inputs import (
    Options,
    empty_output,
    validate,
)
from cudnn_mha.kernels import NotServed, in_layout
from cudnn_mha.ops import (
    TAGS,
    cast_by_autocast,
    library,
    no_double_backward,
    refused,
    register_kernel,
    register_loop_for_vmap,
    register_without_backward,
    seed_of,
)
from cudnn_mha.routes import Given
from cudnn_mha.terms import Terms, make_terms

_OPERANDS = "Tensor? seq_lens_q, Tensor? seq_lens_kv, Tensor? alibi_slopes, Tensor? sinks"
_PADDED = f"Tensor query, Tensor key, Tensor value, Tensor? attn_bias, {_OPERANDS}"
_PACKED = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_kv, "
    f"{_OPERANDS}, SymInt max_seqlen_q, SymInt max_seqlen_kv"
)
_TERMS = (
    'float? scale=None, str causal_alignment="top_left", SymInt[2] window=-1, bool alibi=False, '
    "float softcap=0.0, SymInt? workspace_limit=None, bool fallback=True"
)
_CALL = f"float dropout_p=0.0, bool is_causal=False, *, {_TERMS}, bool deterministic=False"
_LEFT = "(Tensor output, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset)"
_FOUND = "Tensor grad_query, Tensor grad_key, Tensor grad_value"
_SCHEMAS = {
    "sdpa_padded_forward": (
        f"({_PADDED}, {_CALL}, bool bias_gradient=False, bool sinks_gradient=False) -> {_LEFT}"
    ),
    "sdpa_padded_inference": (
        f"({_PADDED}, {_CALL}, bool return_lse=False) -> (Tensor output, Tensor logsumexp)"
    ),
    "sdpa_padded_backward": (
        f"(Tensor grad_out, {_PADDED}, Tensor out, Tensor logsumexp, Tensor philox_seed, "
        f"Tensor philox_offset, {_CALL}, bool bias_gradient=False, bool sinks_gradient=False) -> "
        f"({_FOUND}, Tensor grad_attn_bias, Tensor grad_sinks)"
    ),
    "sdpa_varlen_forward": f"({_PACKED}, {_CALL}, bool sinks_gradient=False) -> {_LEFT}",
    "sdpa_varlen_inference": (
        f"({_PACKED}, {_CALL}, bool return_lse=False) -> (Tensor output, Tensor logsumexp)"
    ),
    "sdpa_varlen_backward": (
        f"(Tensor grad_out, {_PACKED}, Tensor out, Tensor logsumexp, Tensor philox_seed, "
        f"Tensor philox_offset, {_CALL}, bool sinks_gradient=False) -> "
        f"({_FOUND}, Tensor grad_sinks)"
    ),
    "sdpa_paged": (
        "(Tensor query, Tensor key_pages, Tensor value_pages, Tensor block_table, "
        f"Tensor seq_lens_kv, Tensor? seq_lens_q, Tensor? alibi_slopes, Tensor? sinks, "
        f"bool is_causal=False, *, {_TERMS.replace('top_left', 'bottom_right')}, "
        "bool return_lse=False) -> "
        "(Tensor output, Tensor logsumexp)"
    ),
}
NAMES = tuple(_SCHEMAS)
"""Of the operators."""

for _name, _schema in _SCHEMAS.items():
    library.define(_name + _schema, tags=TAGS)

sdpa_padded_forward = torch.ops.cudnn_mha.sdpa_padded_forward
sdpa_padded_backward = torch.ops.cudnn_mha.sdpa_padded_backward
sdpa_padded_inference = torch.ops.cudnn_mha.sdpa_padded_inference
sdpa_varlen_forward = torch.ops.cudnn_mha.sdpa_varlen_forward
sdpa_varlen_backward = torch.ops.cudnn_mha.sdpa_varlen_backward
sdpa_varlen_inference = torch.ops.cudnn_mha.sdpa_varlen_inference
sdpa_paged = torch.ops.cudnn_mha.sdpa_paged


# ---------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class _Asked:
    """What all operators take by keyword, and the options and terms that it makes."""

    scale: float | None = None
    causal_alignment: str = "top_left"
    window: Sequence[int] = (-1, -1)
    alibi: bool = False
    softcap: float = 0.0
    deterministic: bool = False
    workspace_limit: int | None = None
    fallback: bool = True

    def options(
        self, given: Given, dropout_p: float, is_causal: bool, *, return_lse: bool
    ) -> Options:
        query, key, value = given[:3]
        limit = config.parse_bytes(self.workspace_limit)
        return Options(
            dropout_p,
            is_causal,
            self.scale,
            enable_gqa=not query.shape[-3] == key.shape[-3] == value.shape[-3],
            return_lse=return_lse,
            deterministic=self.deterministic,
            workspace_limit=config.settings().workspace_limit if limit is None else limit,
            fallback=self.fallback,
        )

    def terms(self, given: Given, is_causal: bool) -> Terms:
        window: Any = tuple(self.window)
        alibi = self.alibi or given.slopes is not None
        return make_terms(is_causal, self.causal_alignment, window, self.softcap, alibi)


def _wanting(tensor: Tensor | None, wanted: bool) -> Tensor | None:
    """The tensor as what is decided on it sees whether its gradient is wanted."""
    if tensor is not None and wanted and not tensor.is_floating_point():
        raise TypeError(
            f"attn_bias of dtype {tensor.dtype} has no gradient: call with bias_gradient=False"
        )
    return None if tensor is None else tensor.detach().requires_grad_(wanted)


def _drawn(dropout_p: float, seed: Tensor, offset: Tensor) -> padded.Drawn | None:
    return (seed, offset) if dropout_p else None


def _or_empty(tensor: Tensor | None, query: Tensor) -> Tensor:
    """Operators return no None."""
    return query.new_empty(0, dtype=torch.float32) if tensor is None else tensor.contiguous()


def _require_stash(given: Given, dropout_p: float, lse: tuple[int, ...], **stash: Tensor) -> None:
    """Raises for what is not of the shape that the forward of these tensors left."""
    output = (*given.query.shape[:-1], given.value.shape[-1])
    scalar = () if dropout_p else (0,)
    shapes = {"logsumexp": lse, "philox_seed": scalar, "philox_offset": scalar}
    for name, tensor in stash.items():
        shape = shapes.get(name, output)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be of shape {shape}, got {tuple(tensor.shape)}")
    for name in ("grad_out", "out"):
        if stash[name].dtype != given.query.dtype:
            raise TypeError(
                f"{name} must be of the dtype of query, {given.query.dtype}, got "
                f"{stash[name].dtype}"
            )


def _padded_given(tensors: tuple[Any, ...], bias_gradient: bool, sinks_gradient: bool) -> Given:
    query, key, value, mask, lengths_q, lengths_kv, slopes, sinks = tensors
    mask = _wanting(mask, bias_gradient)
    sinks = _wanting(sinks, sinks_gradient)
    return Given(query, key, value, mask, lengths_q, lengths_kv, slopes, sinks)


def _require_padded(given: Given, options: Options) -> None:
    query, key, value = given[:3]
    validate(query, key, value, given.mask, options)
    if query.dim() != 4 or not query.shape[0] == key.shape[0] == value.shape[0]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(f"query, key and value must be (B, H, S, D) with the same B, got {shapes}")
    padded.validate_given(given)


def _padded_forward(
    *arguments: Any, bias_gradient: bool = False, sinks_gradient: bool = False, **asked: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, dropout_p, is_causal = _split(arguments, 8)
    given = _padded_given(tensors, bias_gradient, sinks_gradient)
    own = _Asked(**asked)
    options = own.options(given, dropout_p, is_causal, return_lse=True)
    _require_padded(given, options)
    terms = own.terms(given, is_causal)
    seed, offset = seed_of(given.query, dropout_p)
    call = (given, options, terms, _drawn(dropout_p, seed, offset))
    try:
        output, lse = padded_kernels.forward(*call)
    except NotServed as error:
        refused(*given[:3], dropout_p, error.reasons, own.fallback)
        output, lse = padded_kernels.reference_forward(*call)
    return output, lse, seed, offset


def _padded_inference(
    *arguments: Any, return_lse: bool = False, **asked: Any
) -> tuple[Tensor, Tensor]:
    tensors, dropout_p, is_causal = _split(arguments, 8)
    given = _padded_given(tensors, False, False)
    own = _Asked(**asked)
    options = own.options(given, dropout_p, is_causal, return_lse=return_lse)
    _require_padded(given, options)
    with torch.no_grad():
        output, lse = padded.attend(given, options, own.terms(given, is_causal))
    output = in_layout(output, padded_kernels.output_stride(given))
    return output, _or_empty(lse, given.query)


def _padded_backward(
    grad_out: Tensor,
    *arguments: Any,
    bias_gradient: bool = False,
    sinks_gradient: bool = False,
    **asked: Any,
) -> tuple[Tensor, ...]:
    (*tensors, output, lse, seed, offset), dropout_p, is_causal = _split(arguments, 12)
    given = _padded_given(tuple(tensors), bias_gradient, sinks_gradient)
    own = _Asked(**asked)
    options = own.options(given, dropout_p, is_causal, return_lse=True)
    _require_padded(given, options)
    _require_stash(
        given,
        dropout_p,
        tuple(given.query.shape[:-1]),
        grad_out=grad_out,
        out=output,
        logsumexp=lse,
        philox_seed=seed,
        philox_offset=offset,
    )
    terms = own.terms(given, is_causal)
    call = (grad_out, given, output, lse, options, terms, _drawn(dropout_p, seed, offset))
    try:
        found = padded_kernels.backward(*call)
    except NotServed as error:
        refused(*given[:3], dropout_p, error.reasons, own.fallback)
        found = padded_kernels.reference_backward(*call)
    return *found[:3], *(_or_empty(t, given.query) for t in found[3:])


def _packed_given(tensors: tuple[Any, ...], sinks_gradient: bool) -> Given:
    query, key, value, starts_q, starts_kv, lengths_q, lengths_kv, slopes, sinks = tensors
    sinks = _wanting(sinks, sinks_gradient)
    return Given(query, key, value, None, lengths_q, lengths_kv, slopes, sinks, starts_q, starts_kv)


def _packed_forward(
    *arguments: Any, sinks_gradient: bool = False, **asked: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (*tensors, longest_q, longest_kv), dropout_p, is_causal = _split(arguments, 11)
    given = _packed_given(tuple(tensors), sinks_gradient)
    own = _Asked(**asked)
    options = own.options(given, dropout_p, is_causal, return_lse=True)
    packed.validate(given, longest_q, longest_kv, options)
    terms = own.terms(given, is_causal)
    seed, offset = seed_of(given.query, dropout_p)
    call = (given, longest_q, longest_kv, options, terms)
    drawn = _drawn(dropout_p, seed, offset)
    try:
        output, lse = packed_kernels.forward(*call, True, drawn, padding=True)
    except NotServed as error:
        refused(*given[:3], dropout_p, error.reasons, own.fallback)
        output, lse = packed_kernels.reference_forward(*call, drawn)
    return output.contiguous(), lse.contiguous(), seed, offset


def _packed_inference(
    *arguments: Any, return_lse: bool = False, **asked: Any
) -> tuple[Tensor, Tensor]:
    (*tensors, longest_q, longest_kv), dropout_p, is_causal = _split(arguments, 11)
    given = _packed_given(tuple(tensors), False)
    own = _Asked(**asked)
    options = own.options(given, dropout_p, is_causal, return_lse=return_lse)
    packed.validate(given, longest_q, longest_kv, options)
    terms = own.terms(given, is_causal)
    with torch.no_grad():
        output, lse = packed.attend(given, longest_q, longest_kv, options, terms)
    return output.contiguous(), _or_empty(lse, given.query)


def _packed_backward(
    grad_out: Tensor, *arguments: Any, sinks_gradient: bool = False, **asked: Any
) -> tuple[Tensor, ...]:
    (*tensors, longest_q, longest_kv, output, lse, seed, offset), dropout_p, is_causal = _split(
        arguments, 15
    )
    given = _packed_given(tuple(tensors), sinks_gradient)
    own = _Asked(**asked)
    options = own.options(given, dropout_p, is_causal, return_lse=True)
    packed.validate(given, longest_q, longest_kv, options)
    _require_stash(
        given,
        dropout_p,
        (given.query.shape[1], given.query.shape[0]),
        grad_out=grad_out,
        out=output,
        logsumexp=lse,
        philox_seed=seed,
        philox_offset=offset,
    )
    terms = own.terms(given, is_causal)
    call = (grad_out, given, output, lse, longest_q, longest_kv, options, terms)
    drawn = _drawn(dropout_p, seed, offset)
    try:
        found = packed_kernels.backward(*call, drawn, padding=True)
    except NotServed as error:
        refused(*given[:3], dropout_p, error.reasons, own.fallback)
        found = packed_kernels.reference_backward(*call, drawn)
    return *(t.contiguous() for t in found[:3]), _or_empty(found.sinks, given.query)


def _paged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    lengths_kv: Tensor,
    lengths_q: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool = False,
    *,
    causal_alignment: str = "bottom_right",
    return_lse: bool = False,
    **asked: Any,
) -> tuple[Tensor, Tensor]:
    given = Given(query, key, value, None, lengths_q, lengths_kv, slopes, sinks)
    own = _Asked(causal_alignment=causal_alignment, **asked)
    options = own.options(given, 0.0, is_causal, return_lse=return_lse)
    paged.validate(given, table, options)
    with torch.no_grad():
        output, lse = paged.attend(given, table, options, own.terms(given, is_causal))
    return in_layout(output, padded_kernels.output_stride(given)), _or_empty(lse, query)


def _split(arguments: tuple[Any, ...], count: int) -> tuple[tuple[Any, ...], float, bool]:
    """So many first arguments, and dropout_p and is_causal, which the dispatcher may leave out."""
    given = arguments[count:]
    dropout_p, is_causal = given + (0.0, False)[len(given) :]
    return arguments[:count], dropout_p, is_causal


_kernels: dict[str, Callable[..., Any]] = {
    "sdpa_padded_forward": _padded_forward,
    "sdpa_padded_inference": _padded_inference,
    "sdpa_padded_backward": _padded_backward,
    "sdpa_varlen_forward": _packed_forward,
    "sdpa_varlen_inference": _packed_inference,
    "sdpa_varlen_backward": _packed_backward,
    "sdpa_paged": _paged,
}
for _name, _kernel in _kernels.items():
    register_kernel(_name, _kernel)


# ----------------------------------------------------------------------------------- fake tensors


def _fake_seed(query: Tensor, arguments: tuple[Any, ...], count: int) -> list[Tensor]:
    shape = () if any(arguments[count : count + 1]) else (0,)
    return [query.new_empty(shape, dtype=torch.int64) for _ in range(2)]


def _fake_lse(query: Tensor, shape: Sequence[Any], wanted: bool) -> Tensor:
    return query.new_empty(shape if wanted else (0,), dtype=torch.float32)


def _fake_sum(query: Tensor, tensor: Tensor | None, wanted: bool) -> Tensor:
    """The gradient of a mask or of sinks."""
    if tensor is None or not wanted:
        return query.new_empty(0, dtype=torch.float32)
    return tensor.new_empty(tensor.shape)


def _padded_forward_fake(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    query, value = arguments[0], arguments[2]
    output = empty_output(query, value.shape[-1])
    return output, _fake_lse(query, query.shape[:-1], True), *_fake_seed(query, arguments, 8)


def _padded_inference_fake(
    *arguments: Any, return_lse: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    query, value = arguments[0], arguments[2]
    output = empty_output(query, value.shape[-1])
    return output, _fake_lse(query, query.shape[:-1], return_lse)


def _padded_backward_fake(
    grad_out: Tensor,
    *arguments: Any,
    bias_gradient: bool = False,
    sinks_gradient: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    query, key, value, mask, sinks = *arguments[:4], arguments[7]
    return (
        *(torch.empty_like(t) for t in (query, key, value)),
        _fake_sum(query, mask, bias_gradient),
        _fake_sum(query, sinks, sinks_gradient),
    )


def _packed_fake(query: Tensor, value: Tensor, wants_lse: bool) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    output = query.new_empty((tokens, heads, value.shape[-1]))
    return output, _fake_lse(query, (heads, tokens), wants_lse)


def _packed_forward_fake(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    query, value = arguments[0], arguments[2]
    return *_packed_fake(query, value, True), *_fake_seed(query, arguments, 11)


def _packed_inference_fake(
    *arguments: Any, return_lse: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    return _packed_fake(arguments[0], arguments[2], return_lse)


def _packed_backward_fake(
    grad_out: Tensor, *arguments: Any, sinks_gradient: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    query, sinks = arguments[0], arguments[8]
    return (
        *(t.new_empty(t.shape) for t in arguments[:3]),
        _fake_sum(query, sinks, sinks_gradient),
    )


_fakes: dict[str, Callable[..., Any]] = {
    "sdpa_padded_forward": _padded_forward_fake,
    "sdpa_padded_inference": _padded_inference_fake,
    "sdpa_padded_backward": _padded_backward_fake,
    "sdpa_varlen_forward": _packed_forward_fake,
    "sdpa_varlen_inference": _packed_inference_fake,
    "sdpa_varlen_backward": _packed_backward_fake,
    "sdpa_paged": _padded_inference_fake,
}
for _name, _fake in _fakes.items():
    torch.library.register_fake(f"cudnn_mha::{_name}", _fake, lib=library)


# --------------------------------------------------------------------------------------- autograd


def _stash(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    tensors = [t for t in inputs if t is None or isinstance(t, Tensor)]
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = inputs[len(tensors) :]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.options = keyword_only_inputs


def _require_asked(ctx: Any, index: int, name: str, option: str) -> None:
    if ctx.needs_input_grad[index] and not ctx.options[option]:
        raise RuntimeError(f"{name} requires a gradient: call the forward with {option}=True")


def _padded_gradients(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_output is None:
        return (None,) * 10
    _require_asked(ctx, 3, "attn_bias", "bias_gradient")
    _require_asked(ctx, 7, "sinks", "sinks_gradient")
    saved = ctx.saved_tensors  # once: a checkpoint computes them anew
    tensors, stash = saved[:8], saved[8:]
    *found, bias, sinks = sdpa_padded_backward(
        grad_output, *tensors, *stash, *ctx.numbers, **ctx.options
    )
    bias = bias if ctx.needs_input_grad[3] else None
    sinks = sinks if ctx.needs_input_grad[7] else None
    return *found, bias, None, None, None, sinks, None, None


def _packed_gradients(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_output is None:
        return (None,) * 13
    _require_asked(ctx, 8, "sinks", "sinks_gradient")
    saved = ctx.saved_tensors  # once: a checkpoint computes them anew
    tensors, stash = saved[:9], saved[9:]
    longest, rest = ctx.numbers[:2], ctx.numbers[2:]
    *found, sinks = sdpa_varlen_backward(
        grad_output, *tensors, *longest, *stash, *rest, **ctx.options
    )
    sinks = sinks if ctx.needs_input_grad[8] else None
    return *found, *(None,) * 5, sinks, *(None,) * 4


for _name, _gradients in (
    ("sdpa_padded", _padded_gradients),
    ("sdpa_varlen", _packed_gradients),
):
    torch.library.register_autograd(
        f"cudnn_mha::{_name}_forward", _gradients, setup_context=_stash, lib=library
    )
    torch.library.register_autograd(f"cudnn_mha::{_name}_backward", no_double_backward, lib=library)
    register_without_backward(
        f"{_name}_inference",
        f"{_name}_inference leaves nothing for a backward; call {_name}_forward",
    )
register_without_backward("sdpa_paged", paged.NO_GRADIENT)

for _op, _dropout in (
    (sdpa_padded_forward, 8),
    (sdpa_padded_inference, 8),
    (sdpa_padded_backward, None),
    (sdpa_varlen_forward, 11),
    (sdpa_varlen_inference, 11),
    (sdpa_varlen_backward, None),
    (sdpa_paged, None),
):
    register_loop_for_vmap(_op, _dropout)

for _op in (sdpa_padded_forward, sdpa_padded_inference, sdpa_varlen_forward, sdpa_varlen_inference):
    cast_by_autocast(_op)


# ------------------------------------------------------------------------------------------ FLOPs


def _flops(
    query: Any, key: Any, value: Any, lead: tuple[int, int], products: tuple[int, int]
) -> int:
    """Operations of products over scores ``lead`` for each head, as if nothing were masked."""
    heads = query[-3] if len(query) == 4 else query[1]
    found: int = 2 * heads * lead[0] * lead[1] * (products[0] * query[-1] + products[1] * value[-1])
    return found


@register_flop_formula([sdpa_padded_forward, sdpa_padded_inference])
def _padded_forward_flops(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> int:
    return _flops(query, key, value, (query[0] * query[2], key[2]), (1, 1))


@register_flop_formula(sdpa_padded_backward)
def _padded_backward_flops(
    grad_out: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any
) -> int:
    return _flops(query, key, value, (query[0] * query[2], key[2]), (3, 2))


@register_flop_formula([sdpa_varlen_forward, sdpa_varlen_inference])
def _packed_forward_flops(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> int:
    """Every query with as many keys as the longest sequence has."""
    return _flops(query, key, value, (query[0], args[7]), (1, 1))


@register_flop_formula(sdpa_varlen_backward)
def _packed_backward_flops(
    grad_out: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any
) -> int:
    return _flops(query, key, value, (query[0], args[7]), (3, 2))


@register_flop_formula(sdpa_paged)
def _paged_flops(query: Any, key: Any, value: Any, table: Any, *args: Any, **options: Any) -> int:
    """Every query with as many keys as its pages hold."""
    return _flops(query, key, value, (query[0] * query[2], table[1] * key[2]), (1, 1))
