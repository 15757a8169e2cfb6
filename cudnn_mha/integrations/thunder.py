"""cuDNN attention as an executor of Lightning Thunder, called ``"cudnn_mha"``.

.. code-block:: python

    import thunder
    from cudnn_mha.integrations.thunder import cudnn_mha_ex

    model = thunder.jit(model, executors=[cudnn_mha_ex, *thunder.get_default_executors()])

It claims ``torch.nn.functional.scaled_dot_product_attention`` where cuDNN serves the call, forward
and backward, and leaves every other call to the executors after it. What runs are the operators
of `cudnn_mha.ops`. A trace has shapes but no strides, so the verdict is on contiguous tensors; the
operators decide anew on what they get.

Thunder's function takes no ``enable_gqa``; one key head for all query heads is served as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_mha import __version__
from cudnn_mha.dispatch import TRANSIENT
from cudnn_mha.explanation import Explanation, explain
from cudnn_mha.ops import sdpa_backward, sdpa_forward, sdpa_inference

_PIP = "pip install 'lightning-thunder>=0.2.6'"

try:
    import thunder.torch as ltorch
    from thunder.core import dtypes
    from thunder.core.prims import OpTags
    from thunder.core.proxies import TensorProxy, pyval
    from thunder.core.transform_common import NON_FUNCTIONAL_OPS
    from thunder.core.transforms import get_grad, put_grad, put_grads
    from thunder.extend import OperatorExecutor, register_executor
except ModuleNotFoundError as error:
    if error.name != "thunder":
        raise
    raise ImportError(f"cudnn_mha.integrations.thunder needs Lightning Thunder: {_PIP}") from error
except AttributeError as error:
    # Its tables name functions that newer releases of PyTorch no longer have.
    raise ImportError(
        f"the installed Lightning Thunder does not load with PyTorch {torch.__version__}: {error}; "
        f"a release made for it may: {_PIP}"
    ) from error

cudnn_mha_ex = OperatorExecutor("cudnn_mha", version=__version__)
"""The executor. Importing this module registers it, so that its name may stand for it."""

register_executor(cudnn_mha_ex)


# -------------------------------------------------------------------------------------- operators


def _options(scale: float | None) -> dict[str, Any]:
    return {"scale": scale, "deterministic": torch.are_deterministic_algorithms_enabled()}


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    return sdpa_forward(query, key, value, attn_mask, dropout_p, is_causal, **_options(scale))


def _forward_meta(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Any, Any, Any, Any]:
    output = _inference_meta(query, key, value, attn_mask, dropout_p, is_causal, scale)
    rows, drawn = (*query.shape[:3], 1), () if dropout_p else (0,)
    rest = ((rows, dtypes.float32), (drawn, dtypes.int64), (drawn, dtypes.int64))
    lse, seed, offset = (
        TensorProxy(like=query, shape=shape, dtype=dtype, requires_grad=False)
        for shape, dtype in rest
    )
    return output, lse, seed, offset


def _inference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    return sdpa_inference(query, key, value, attn_mask, dropout_p, is_causal, **_options(scale))


def _inference_meta(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    return TensorProxy(like=query, shape=(*query.shape[:3], value.shape[-1]))


def _backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    stash = (output, lse, seed, offset)
    call = (grad_output, query, key, value, *stash, attn_mask, dropout_p, is_causal)
    return sdpa_backward(*call, **_options(scale))[:3]


def _backward_meta(grad_output: Any, query: Any, key: Any, value: Any, *stash: Any) -> Any:
    return tuple(TensorProxy(like=tensor) for tensor in (query, key, value))


def _mask_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    attn_mask: Tensor,
    is_causal: bool,
    scale: float | None,
) -> Any:
    stash = (output, lse, seed, offset)
    call = (grad_output, query, key, value, *stash, attn_mask, 0.0, is_causal)
    return sdpa_backward(*call, bias_gradient=True, **_options(scale))[3]


def _mask_backward_meta(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    lse: Any,
    seed: Any,
    offset: Any,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
) -> Any:
    return TensorProxy(like=attn_mask)


def _operator(name: str, function: Any, meta: Any) -> Any:
    """One of our operators in a trace, where it is not run twice: dropout would draw anew."""
    return cudnn_mha_ex.register_operator(
        f"cudnn_mha_{name}",
        fn=function,
        meta=meta,
        tags=(OpTags.RANDOM_OP, OpTags.DONT_RECOMPUTE_IN_BACKWARD),
    )


_forward_op = _operator("sdpa_forward", _forward, _forward_meta)
_inference_op = _operator("sdpa_inference", _inference, _inference_meta)
_backward_op = _operator("sdpa_backward", _backward, _backward_meta)
_mask_backward_op = _operator("sdpa_mask_backward", _mask_backward, _mask_backward_meta)

NON_FUNCTIONAL_OPS.update({_forward_op.id, _inference_op.id})  # two calls draw two dropout masks


# ------------------------------------------------------------------------------------ which calls


def _claims(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
) -> bool:
    """Whether cuDNN serves a call forward and backward: a trace does not tell which is wanted."""
    tensors = [t for t in (query, key, value, attn_mask) if t is not None]
    dropout_p, is_causal = pyval(dropout_p), pyval(is_causal)
    if not _on_one_gpu(*tensors) or not _ours(query, key, value, attn_mask, dropout_p, is_causal):
        return False
    verdict = _explain(
        query.device.index,
        *(_meta(t) for t in (query, key, value)),
        None if attn_mask is None else _meta(attn_mask),
        dropout_p,
        is_causal,
        None if scale is None else pyval(scale),
        enable_gqa=True,
        requires_grad=True,
    )
    # What is only being compiled is served by the time that it runs, or a little later.
    return TRANSIENT.issuperset(reason.rule for reason in verdict.reasons)


def _explain(index: int, *tensors: Any, **options: Any) -> Explanation:
    """The verdict on a call on that GPU."""
    with torch.cuda.device(index):
        return explain(*tensors, **options)


def _on_one_gpu(*tensors: Any) -> bool:
    first = tensors[0].device
    return first.type == "cuda" and all(t.device == first for t in tensors)


def _ours(query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool) -> bool:
    """Whether a call is one of ours at all: Thunder broadcasts more than PyTorch's function."""
    if not all(t.ndim == 4 and t.dtype == query.dtype for t in (query, key, value)):
        return False
    (batch, heads, seq_q, dim), (_, _, seq_kv, _) = _shape(query), _shape(key)
    for tensor in (key, value):
        shape = _shape(tensor)
        if shape[0] != batch or shape[1] == 0 or heads % shape[1]:
            return False
    if _shape(key)[3] != dim or _shape(value)[2] != seq_kv:
        return False
    if mask is None:
        return True
    scores = (batch, heads, seq_q, seq_kv)
    return (
        not is_causal
        and mask.ndim <= 4
        and _torch_dtype(mask) in (torch.bool, _torch_dtype(query))
        # The mask's gradient is an operator of its own, which must not draw other weights.
        and not (dropout_p and _learnt(mask))
        and all(m in (1, s) for m, s in zip(_shape(mask)[::-1], scores[::-1], strict=False))
    )


def _learnt(mask: Any) -> bool:
    """Whether a mask may have a gradient."""
    return mask is not None and _torch_dtype(mask) != torch.bool


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(pyval(size) for size in tensor.shape)


def _torch_dtype(tensor: Any) -> torch.dtype:
    dtype: torch.dtype = dtypes.to_torch_dtype(tensor.dtype)
    return dtype


def _meta(tensor: Any) -> Tensor:
    return torch.empty(_shape(tensor), dtype=_torch_dtype(tensor), device="meta")


# --------------------------------------------------------------------------------- in their place


def _execute(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
) -> Any:
    """A call of which no gradient is wanted."""
    return _inference_op(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _differentiate(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
) -> Any:
    """A call together with its gradients; of these Thunder drops what nobody uses."""
    inputs = (query, key, value)
    output, *rest = _forward_op(*inputs, attn_mask, dropout_p, is_causal, scale)
    stash = (get_grad(output), *inputs, output, *rest, attn_mask)
    put_grads(inputs, _backward_op(*stash, dropout_p, is_causal, scale))
    if _learnt(attn_mask):
        put_grad(attn_mask, _mask_backward_op(*stash, is_causal, scale))
    return output


cudnn_mha_ex.register_implementation(
    ltorch.scaled_dot_product_attention,
    checker=_claims,
    execution_transform=_execute,
    grad_transform=_differentiate,
)
