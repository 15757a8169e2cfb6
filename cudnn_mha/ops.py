"""The operators in PyTorch's dispatcher: attention forward and backward as two explicit nodes.

============================================  ====================================================
``torch.ops.cudnn_mha.sdpa_forward``          output, and what the backward needs of it
``torch.ops.cudnn_mha.sdpa_backward``         the gradients, from what the forward returned
``torch.ops.cudnn_mha.sdpa_inference``        output alone: no log-sum-exp is computed
============================================  ====================================================

They are what `cudnn_sdpa` becomes under ``torch.compile`` and ``torch.export``. Their arguments
are those of ``aten::_scaled_dot_product_cudnn_attention`` and its backward, in that order and
with these names; left out is what a dense call has no use for (``compute_log_sumexp``,
``return_debug_mask``, ``cum_seq_*``, ``max_*``), added are the gradient of the mask and, by
keyword, what `cudnn_sdpa` has and PyTorch has not.

Stashed for the backward are ``output``; ``logsumexp``, float32 ``(B, Hq, Sq, 1)``, natural
logarithm; ``philox_seed`` and ``philox_offset``, 0-d int64, empty where there is no dropout. The
log-sum-exp of a row whose float mask has no entry above -1e4 is that of the scores less the row's
largest entry. It has no gradient.

Tensors are ``(B, H, S, D)`` of one batch size; of a ``DTensor`` batch and heads may be sharded
(`cudnn_mha.integrations.distributed`). Where cuDNN does not serve a call the operators
compute it by plain PyTorch, on any device; with ``fallback=False`` they raise
`CudnnSdpaUnsupportedError`.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.library import Library
from torch.utils.flop_counter import register_flop_formula

from cudnn_mha import kernels, runtime
from cudnn_mha.attention import draw
from cudnn_mha.checks import Reason
from cudnn_mha.dispatch import TRANSIENT, log_fallback
from cudnn_mha.errors import CudnnSdpaUnsupportedError
from cudnn_mha.inputs import empty_output
from cudnn_mha.kernels import Arguments

_OPTIONS = "bool deterministic=False, SymInt? workspace_limit=None, bool fallback=True"
_CALL = "Tensor query, Tensor key, Tensor value, Tensor? attn_bias"
_SCHEMAS = {
    "sdpa_forward": (
        f"({_CALL}, float dropout_p=0.0, bool is_causal=False, *, float? scale=None, "
        f"bool bias_gradient=False, {_OPTIONS}) -> (Tensor output, Tensor logsumexp, "
        "Tensor philox_seed, Tensor philox_offset)"
    ),
    "sdpa_inference": (
        f"({_CALL}, float dropout_p=0.0, bool is_causal=False, *, float? scale=None, "
        f"{_OPTIONS}) -> Tensor"
    ),
    "sdpa_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "Tensor philox_seed, Tensor philox_offset, Tensor? attn_bias, float dropout_p, "
        f"bool is_causal, *, float? scale=None, bool bias_gradient=False, {_OPTIONS}) -> "
        "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_bias)"
    ),
}
TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.nondeterministic_seeded,  # dropout; and a kernel is worth keeping, not recomputing
    torch.Tag.needs_exact_strides,  # plans are made for strides
)

library = Library("cudnn_mha", "DEF")
for _name, _schema in _SCHEMAS.items():
    library.define(_name + _schema, tags=TAGS)

sdpa_forward = torch.ops.cudnn_mha.sdpa_forward
sdpa_inference = torch.ops.cudnn_mha.sdpa_inference
sdpa_backward = torch.ops.cudnn_mha.sdpa_backward


# ---------------------------------------------------------------------------------------- kernels


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    bias_gradient: bool = False,
    deterministic: bool = False,
    workspace_limit: int | None = None,
    fallback: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arguments = Arguments(dropout_p, is_causal, scale, deterministic, workspace_limit)
    seed, offset = seed_of(query, dropout_p)
    output, lse = _run_forward(
        query, key, value, attn_bias, arguments, fallback, seed, offset, True, bias_gradient
    )
    assert lse is not None
    return output, lse, seed, offset


def _inference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    deterministic: bool = False,
    workspace_limit: int | None = None,
    fallback: bool = True,
) -> Tensor:
    arguments = Arguments(dropout_p, is_causal, scale, False, workspace_limit)
    seed, offset = seed_of(query, dropout_p) if dropout_p else (None, None)
    return _run_forward(
        query, key, value, attn_bias, arguments, fallback, seed, offset, False, False
    )[0]


def _run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    arguments: Arguments,
    fallback: bool,
    seed: Tensor | None,
    offset: Tensor | None,
    gradient: bool,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    drawn = (seed, offset) if arguments.dropout_p else (None, None)
    try:
        return kernels.forward(
            query,
            key,
            value,
            bias,
            arguments,
            gradient,
            bias_gradient,
            seed=drawn[0],
            offset=drawn[1],
        )
    except kernels.NotServed as error:
        refused(query, key, value, arguments.dropout_p, error.reasons, fallback)
    return kernels.reference_forward(query, key, value, bias, arguments, drawn[0])


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    bias_gradient: bool = False,
    deterministic: bool = False,
    workspace_limit: int | None = None,
    fallback: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arguments = Arguments(dropout_p, is_causal, scale, deterministic, workspace_limit)
    drawn = (philox_seed, philox_offset) if dropout_p else (None, None)
    call = (grad_out, query, key, value, out, logsumexp, attn_bias, arguments)
    try:
        result = kernels.backward(*call, bias_gradient, seed=drawn[0], offset=drawn[1])
    except kernels.NotServed as error:
        refused(query, key, value, dropout_p, error.reasons, fallback)
        result = kernels.reference_backward(*call, drawn[0], bias_gradient=bias_gradient)
    grad_bias = result.bias
    if grad_bias is None or attn_bias is None:
        grad_bias = query.new_empty(0)
    return result.query, result.key, result.value, grad_bias.contiguous()


def seed_of(query: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Seed and offset of the dropout, 0-d int64; empty where there is none."""
    if dropout_p:
        seed, offset = draw(query.device)
        return seed.clone(), offset.clone()  # outputs of an operator share no memory
    return query.new_empty(0, dtype=torch.int64), query.new_empty(0, dtype=torch.int64)


def refused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    reasons: tuple[Reason, ...],
    fallback: bool,
) -> None:
    """Raises, or says that PyTorch computes."""
    if not query.numel():
        return
    call = kernels.describe(query, key, value)
    # Where the other direction may find a plan, it would drop other weights than PyTorch drops.
    one_sided = dropout_p > 0 and not TRANSIENT.isdisjoint(reason.rule for reason in reasons)
    if not fallback or one_sided:
        raise CudnnSdpaUnsupportedError(call, reasons)
    if query.is_cuda:
        log_fallback(call, reasons)


@_disable_dynamo
def refuse_compiled() -> NoReturn:
    """Raises out of compiled code, which knows no exceptions of others."""
    message = (
        "a call that is compiled or sharded must have float16 or bfloat16 tensors of 3 or 4 "
        "dimensions on a CUDA device, and cuDNN allowed; call it with plain tensors outside of the "
        "compiler for every reason"
    )
    raise CudnnSdpaUnsupportedError("a compiled call", (Reason("compiled", message),))


_no_views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def register_kernel(name: str, function: Any) -> None:
    """Has an operator computed by a function, on GPUs and on the CPU."""

    @functools.wraps(function)
    def kernel(*args: Any, **options: Any) -> Any:
        # What it returns is the operator's own, whatever tensor it was a view of in here: autograd
        # forbids to change the views that functions return.
        with torch._C._ExcludeDispatchKeyGuard(_no_views):
            return function(*args, **options)

    for key in ("CUDA", "CPU"):
        library.impl(name, kernel, key)


_kernels = {"sdpa_forward": _forward, "sdpa_inference": _inference, "sdpa_backward": _backward}
for _name, _kernel in _kernels.items():
    register_kernel(_name, _kernel)


# ----------------------------------------------------------------------------------- fake tensors


def _forward_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output = empty_output(query, value.shape[-1])
    lse = query.new_empty((*query.shape[:-1], 1), dtype=torch.float32)
    seed, offset = (query.new_empty(() if dropout_p else 0, dtype=torch.int64) for _ in range(2))
    return output, lse, seed, offset


def _inference_fake(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Tensor:
    return empty_output(query, value.shape[-1])


def _backward_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    bias_gradient: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_bias = query.new_empty(0)
    if bias_gradient and attn_bias is not None:
        grad_bias = attn_bias.new_empty(attn_bias.shape)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), grad_bias


def _with_sharding_rules(fake: Any) -> Any:
    """The fake kernel, which `DTensor` runs before it looks the operator's rules up."""

    @functools.wraps(fake)
    def call(*args: Any, **options: Any) -> Any:
        rules = runtime.sharding_rules()
        if rules is not None:
            rules.register_operators()
        return fake(*args, **options)

    return call


_fakes = {
    "sdpa_forward": _forward_fake,
    "sdpa_inference": _inference_fake,
    "sdpa_backward": _backward_fake,
}
for _name, _fake in _fakes.items():
    torch.library.register_fake(f"cudnn_mha::{_name}", _with_sharding_rules(_fake), lib=library)


# --------------------------------------------------------------------------------------- autograd


def _stash(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    *tensors, ctx.dropout_p, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.options = keyword_only_inputs


def _gradients(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_output is None:
        return (None,) * 6
    bias_gradient = ctx.options["bias_gradient"]
    if ctx.needs_input_grad[3] and not bias_gradient:
        raise RuntimeError(
            "attn_bias requires a gradient: call sdpa_forward with bias_gradient=True"
        )
    query, key, value, bias, *stash = ctx.saved_tensors
    *grads, grad_bias = sdpa_backward(
        grad_output, query, key, value, *stash, bias, ctx.dropout_p, ctx.is_causal, **ctx.options
    )
    return (*grads, grad_bias if bias_gradient and bias is not None else None, None, None)


def no_double_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "cuDNN attention has no double backward: it was called with create_graph=True; compute "
        "this attention under torch.backends.cuda.enable_cudnn_sdp(False)"
    )


torch.library.register_autograd(
    "cudnn_mha::sdpa_forward", _gradients, setup_context=_stash, lib=library
)
torch.library.register_autograd("cudnn_mha::sdpa_backward", no_double_backward, lib=library)


def register_without_backward(name: str, message: str) -> None:
    """Has the backward of an operator for inference raise this."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(message)

    torch.library.register_autograd(f"cudnn_mha::{name}", refuse, lib=library)


register_without_backward(
    "sdpa_inference", "sdpa_inference leaves nothing for a backward; call sdpa_forward"
)


# --------------------------------------------------------------------------------------- autocast


def _autocast(op: Any, device: str) -> Any:
    key = getattr(torch._C.DispatchKey, f"Autocast{device}")
    excluded = torch._C.DispatchKeySet(key)

    def cast(*args: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device.lower())
        tensors = (
            a.to(dtype) if a.is_floating_point() and a.dtype != torch.float64 else a
            for a in args[:3]
        )
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*tensors, *args[3:], **options)

    return cast


def cast_by_autocast(op: Any) -> None:
    """Has ``torch.autocast`` do to an operator's tensors what it does to PyTorch's attention."""
    for device in ("CUDA", "CPU"):
        name = op._qualified_op_name.split("::")[1]
        library.impl(name, _autocast(op, device), f"Autocast{device}")


for _op in (sdpa_forward, sdpa_inference):
    cast_by_autocast(_op)


# ------------------------------------------------------------------------------------------- vmap


def _batched(op: Any, query: int, randomness: bool) -> Any:
    """The rule that makes the dimension which vmap adds a part of the batch.

    Args:
        op: the operator.
        query: where the query is among its arguments.
        randomness: whether it draws the dropout's mask.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any) -> Any:
        size = info.batch_size
        if options.get("bias_gradient"):
            raise RuntimeError("vmap over attention gives no gradient of attn_bias")
        if randomness and any(args[4:5]):
            require_different(info)
        batch = args[query].shape[int(in_dims[query] == 0)]
        folded = [
            _fold(a, dim, size, batch)
            if isinstance(a, Tensor) and (a.dim() > 1 or dim is not None)
            else a
            for a, dim in zip(args, in_dims, strict=True)
        ]
        result = op(*folded, **options)

        def unfold(tensor: Tensor) -> Tensor:
            return tensor.reshape(size, batch, *tensor.shape[1:])

        if isinstance(result, Tensor):
            return unfold(result), 0
        # Seed and offset are one for all, and an absent gradient is empty.
        dims = tuple(0 if t.dim() > 1 else None for t in result)
        return tuple(
            t.reshape(size, batch, *t.shape[1:]) if t.dim() > 1 else t for t in result
        ), dims

    return rule


def register_loop_for_vmap(op: Any, dropout: int | None) -> None:
    """Has vmap call an operator once for each element of its dimension.

    Args:
        op: the operator.
        dropout: where the probability of dropout is among its arguments, if it draws a mask.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any) -> Any:
        if dropout is not None and any(args[dropout : dropout + 1]):
            require_different(info)
        results = [
            op(
                *(
                    a if dim is None else a.select(dim, i)
                    for a, dim in zip(args, in_dims, strict=True)
                ),
                **options,
            )
            for i in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    torch.library.register_vmap(op.default, rule, lib=library)


def require_different(info: Any) -> None:
    """Raises where vmap does not say that every element draws a mask of its own."""
    if info.randomness != "different":
        raise RuntimeError(
            "attention with dropout draws a mask for every element of vmap's dimension: call "
            f"vmap with randomness='different', got {info.randomness!r}"
        )


def _fold(tensor: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """A tensor as ``(size * batch, ...)``; fewer dimensions than 4 broadcast."""
    moved = tensor[None] if dim is None else tensor.movedim(dim, 0)
    while moved.dim() < 5:
        moved = moved.unsqueeze(1)
    return moved.expand(size, batch, *moved.shape[2:]).flatten(0, 1)


for _op, _query, _random in (
    (sdpa_forward, 0, True),
    (sdpa_inference, 0, True),
    (sdpa_backward, 1, False),
):
    torch.library.register_vmap(_op.default, _batched(_op, _query, _random), lib=library)


# ------------------------------------------------------------------------------------------ FLOPs


def _products(query: Any, key: Any, value: Any, with_qk: int, with_v: int) -> int:
    """Operations of products over the scores: so many with Dqk inside, so many with Dv."""
    batch, heads, seq_q, dim_qk = query
    seq_kv, dim_v = key[2], value[3]
    operations: int = 2 * batch * heads * seq_q * seq_kv * (with_qk * dim_qk + with_v * dim_v)
    return operations


def _forward_flops(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> int:
    """Two products for each query head: scores and output. A mask saves none, as PyTorch counts."""
    return _products(query, key, value, 1, 1)


def _backward_flops(
    grad_out: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any
) -> int:
    """Five products: the scores again, their gradient, and those of query, key and value."""
    return _products(query, key, value, 3, 2)


register_flop_formula([sdpa_forward, sdpa_inference])(_forward_flops)
register_flop_formula(sdpa_backward)(_backward_flops)
