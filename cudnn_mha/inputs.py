"""From a caller's tensors to tensors that cuDNN can address, and to the spec of the call.

Everything here is ordinary differentiable PyTorch, so a gradient finds its way back through a
pad, a copy or a broadcast by itself. Tensors are left as they are wherever cuDNN can read them:
strides go into the spec, never into a copy. It all works on ``meta`` tensors too, which is how a
call is described that has shapes but no data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_mha import config
from cudnn_mha.checks import ALIGNMENT, HALF_DTYPES
from cudnn_mha.expressions import LARGEST
from cudnn_mha.spec import (
    AttentionSpec,
    Direction,
    TensorSpec,
    canonical_stride,
    contiguous_stride,
    default_scale,
    dense_stride,
    layout_like,
    layout_order,
)

# A mask row without a larger entry is shifted up; see "low_mask_rows" in checks.HAZARDS.
LOW_MASK_ROW = -1e4

# Elements: PyTorch counts bytes in 63 bits, and a head dimension of 1 is padded to 8.
_MOST_COUNTED = 2**56

DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
"""How specs call a dtype; tensors of others have none."""


@dataclass(frozen=True)
class Options:
    """The arguments of a call that are not tensors."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    deterministic: bool = False
    workspace_limit: int | None = None
    fallback: bool = True


Numbers = tuple[float, bool, float | None, bool, bool, bool | None, int | str | None, bool]
"""The arguments of `make_options` as the caller has them."""


class Inputs(NamedTuple):
    """Tensors that cuDNN can address.

    Attributes:
        query, key, value: ``(B, H, S, D)`` with D a multiple of 8.
        bias: additive ``(B or 1, Hq or 1, Sq, Skv)``, or None.
        shift: what was taken off the bias per row, ``(..., Sq or 1, 1)``, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    shift: Tensor | None

    def are(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether these are the caller's own tensors, and there is no mask."""
        return self.query is query and self.key is key and self.value is value and self.bias is None


class Outline(NamedTuple):
    """What the caller gets back, whatever was padded and broadcast for cuDNN.

    Attributes:
        ndim: number of dimensions of the caller's tensors.
        dim_v: head dimension of the caller's value.
        scale: factor on the scores of the prepared tensors, above 0.
    """

    ndim: int
    dim_v: int
    scale: float


def require_tensors(query: object, key: object, value: object, mask: object) -> None:
    """Raises TypeError for what is no tensor."""
    for name, given in (("query", query), ("key", key), ("value", value), ("attn_mask", mask)):
        if not isinstance(given, Tensor) and not (name == "attn_mask" and given is None):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}")


def require_local(tensors: Iterable[object]) -> None:
    """Raises TypeError for a `DTensor`, which only calls on PyTorch's own terms take."""
    if any(type(tensor).__name__ == "DTensor" for tensor in tensors):
        raise TypeError(
            "a DTensor is taken only by cudnn_sdpa with the arguments that PyTorch's function has; "
            "make this call on local tensors, through "
            "torch.distributed.tensor.experimental.local_map"
        )


def require_kinds(
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    return_lse: object,
    deterministic: object,
    fallback: object,
) -> None:
    """Raises TypeError for what is no number or no bool."""
    numbers = {"dropout_p": dropout_p} | ({} if scale is None else {"scale": scale})
    for name, given in numbers.items():
        if not isinstance(given, int | float | torch.SymInt | torch.SymFloat):
            raise TypeError(f"{name} must be a number, got {given!r}")
    flags = {
        "is_causal": is_causal,
        "enable_gqa": enable_gqa,
        "return_lse": return_lse,
        "deterministic": deterministic,
        "fallback": fallback,
    }
    for name, given in flags.items():
        if not isinstance(given, bool):
            raise TypeError(f"{name} must be True or False, got {given!r}")


def make_options(
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    deterministic: bool | None,
    workspace_limit: int | str | None,
    fallback: bool,
) -> Options:
    """The options that a caller's arguments mean.

    Raises:
        ValueError, TypeError: an argument means nothing; the message names it.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    require_kinds(dropout_p, is_causal, scale, enable_gqa, return_lse, deterministic, fallback)
    if workspace_limit is None and not torch.compiler.is_compiling():  # operators look themselves
        workspace_limit = config.settings().workspace_limit
    return Options(
        float(dropout_p),
        is_causal,
        None if scale is None else float(scale),
        enable_gqa,
        return_lse,
        deterministic,
        config.parse_bytes(workspace_limit),
        fallback,
    )


def autocast(tensor: Tensor) -> Tensor:
    """What ``torch.autocast`` does to the arguments of PyTorch's attention."""
    kind = tensor.device.type
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    # Devices such as "meta" know no autocast and raise where they are asked.
    if eligible and torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def validate(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, o: Options) -> None:
    """Refuses calls that mean nothing, for cuDNN and PyTorch alike.

    Raises:
        ValueError: shapes that do not fit, or a number out of its range.
        TypeError: a tensor's dtype does not fit.
        RuntimeError: both a mask and ``is_causal``, as PyTorch has it; or several devices.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise TypeError(f"{name} must be a dense tensor, got a {kind} one; pad or densify it")
        if not tensor.is_floating_point():
            raise TypeError(
                f"{name} must be of a floating-point dtype, got {tensor.dtype}; cast it"
            )
        if tensor.dim() != query.dim() or tensor.dim() < 2:
            raise ValueError(
                "query, key and value must have the same number of dimensions, 4 (B, H, S, D) or "
                f"3 (H, S, D), got {query.dim()}, {key.dim()} and {value.dim()}"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(
                "query, key and value must have the same dtype, got "
                f"{query.dtype}, {key.dtype} and {value.dtype}; cast them"
            )
    tensors |= {} if mask is None else {"attn_mask": mask}
    for name, tensor in tensors.items():
        if tensor.device != query.device:
            raise RuntimeError(
                f"{name} must be on the device of query, {query.device}, got {tensor.device}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "query and key must have the same head dimension, got "
            f"{query.shape[-1]} and {key.shape[-1]}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key and value must have the same length, got {key.shape[-2]} and {value.shape[-2]}"
        )
    validate_numbers(o)
    lead = lead_shape(query, key, value, o.enable_gqa)
    if mask is None:
        return
    if o.is_causal:
        raise RuntimeError(
            "attn_mask must be None when is_causal is set; put the causal part into the mask"
        )
    if mask.dtype not in (torch.bool, torch.float32, torch.float16, torch.bfloat16, query.dtype):
        raise TypeError(
            "attn_mask must be bool, float32, float16, bfloat16 or of the dtype of query, got "
            f"{mask.dtype}; convert it (True means attend)"
        )
    scores = (*lead, query.shape[-2], key.shape[-2])
    try:
        fits = _broadcast(mask.shape, scores) == scores
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"attn_mask must broadcast to {scores}, got {tuple(mask.shape)}")


def require_alike(tensors: dict[str, Tensor], hint: str = "") -> None:
    """Raises where query, key and value, with heads in dimension 1 each, do not go together.

    Args:
        tensors: the three by the names of the caller's arguments.
        hint: what may be the matter where heads do not fit.
    """
    query, key, value = tensors.values()
    *first, last = tensors
    names = f"{', '.join(first)} and {last}"
    for name, tensor in tensors.items():
        if tensor.dtype != query.dtype or not tensor.is_floating_point():
            raise TypeError(
                f"{names} must have the same floating-point dtype, got {query.dtype}, {key.dtype} "
                f"and {value.dtype}; cast them"
            )
        if tensor.device != query.device:
            raise RuntimeError(
                f"{name} must be on the device of query, {query.device}, got {tensor.device}"
            )
        if tensor.shape[1] == 0 or query.shape[1] % tensor.shape[1]:
            raise ValueError(
                f"the heads of {name} must divide those of query, got {tensor.shape[1]} and "
                f"{query.shape[1]}{hint}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{first[0]} and {first[1]} must have the same head dimension, got "
            f"{query.shape[-1]} and {key.shape[-1]}"
        )


def validate_numbers(o: Options) -> None:
    """Raises ValueError for a number out of its range."""
    if not 0 <= o.dropout_p <= 1:
        raise ValueError(f"dropout_p must be in [0, 1], got {o.dropout_p}")
    if o.scale is not None and not abs(o.scale) <= LARGEST:
        raise ValueError(f"scale must be finite in float32, got {o.scale}")


def require_countable(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, o: Options
) -> None:
    """Refuses a valid call of shapes whose tensors have more elements than PyTorch counts.

    Raises:
        ValueError: names the tensor.
    """
    *batch, heads = lead_shape(query, key, value, o.enable_gqa) or (1,)
    made = {
        "query": (*batch, heads, *query.shape[-2:]),
        "key": (*batch, *key.shape[-3:]),
        "value": (*batch, *value.shape[-3:]),
        "the output": (*batch, heads, query.shape[-2], value.shape[-1]),
    }
    if mask is not None:
        made["attn_mask"] = (*mask.shape[:-1], key.shape[-2])  # which is written out over the keys
    for name, shape in made.items():
        if math.prod(shape) > _MOST_COUNTED:
            raise ValueError(
                f"{name} would be of shape {shape}, of which no GPU holds the elements; make the "
                "call smaller"
            )


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))


def lead_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Batch and head extents of the scores."""
    shapes = [t.shape[:-2] for t in (query, key, value)]
    if enable_gqa and shapes[0]:
        heads = shapes[0][-1]
        for name, tensor in (("key", key), ("value", value)):
            own = tensor.shape[-3]
            if own == 0 or heads % own:
                raise ValueError(
                    f"with enable_gqa the heads of {name} must divide those of query, got "
                    f"{own} and {heads}"
                )
        lead = _broadcast(*(s[:-1] for s in shapes))
        return (*lead, heads)
    try:
        return _broadcast(*shapes)
    except RuntimeError:
        raise ValueError(
            "batch and heads of query, key and value must broadcast, got "
            f"{', '.join(str(tuple(s)) for s in shapes)}; for grouped-query attention set "
            "enable_gqa=True"
        ) from None


def addressable(tensor: Tensor) -> bool:
    """Whether cuDNN can read a query, key, value or gradient where it lies."""
    return _strides_fit(tensor) and tensor.data_ptr() % ALIGNMENT == 0


def _strides_fit(tensor: Tensor) -> bool:
    *rows, last = tensor.stride()
    step = ALIGNMENT // tensor.element_size()
    sizes = tensor.shape
    return (last == 1 or sizes[-1] == 1) and not any(
        stride % step for stride, size in zip(rows, sizes, strict=False) if size > 1
    )


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    o: Options,
    *,
    shifted: bool = True,
) -> Inputs:
    """The tensors of a valid call, made addressable; copies only what has to be.

    Args:
        query, key, value, mask: the caller's.
        o: the caller's other arguments.
        shifted: low rows of a float mask are shifted up; see checks.HAZARDS.
    """
    query, key, value = four_dimensional(query, key, value, o)
    query = sign_moved(query, o.scale)
    query, key, value = (addressable_copy(pad_to_8(t)) for t in (query, key, value))
    if mask is None:
        return Inputs(query, key, value, None, None)
    bias, shift = _bias(mask, query.shape[2], key.shape[2], query.dtype, shifted)
    return Inputs(query, key, value, bias, shift)


def sign_moved(query: Tensor, scale: float | None) -> Tensor:
    """The query with the sign of a scale that is not positive; see checks.HAZARDS."""
    if scale is None or scale > 0:
        return query
    return query * math.copysign(scale != 0, scale)


def four_dimensional(
    query: Tensor, key: Tensor, value: Tensor, o: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as ``(B, H, S, D)`` of one batch size."""
    query, key, value = (t[None] if t.dim() == 3 else t for t in (query, key, value))
    batch, heads = lead_shape(query, key, value, o.enable_gqa)
    # Key and value keep fewer heads: cuDNN groups the query's heads over them.
    return (
        _expand(query, batch, heads),
        _expand(key, batch, key.shape[1]),
        _expand(value, batch, value.shape[1]),
    )


def row_shift(mask: Tensor) -> Tensor:
    """What is taken off each row of a float mask, ``(..., Sq or 1, 1)``: 0 but for low rows."""
    if 0 in mask.shape:
        return mask.new_zeros((*mask.shape[:-1], 1))
    shift = mask.detach().amax(-1, keepdim=True)
    return shift.masked_fill((shift >= LOW_MASK_ROW) | (shift == -math.inf), 0)


def _expand(tensor: Tensor, batch: int, heads: int) -> Tensor:
    if tensor.shape[:2] == (batch, heads):
        return tensor
    return tensor.expand(batch, heads, -1, -1)


def pad_to_8(tensor: Tensor) -> Tensor:
    """The tensor with zeros behind its head dimension, up to a multiple of 8."""
    missing = -tensor.shape[-1] % 8
    if not missing:
        return tensor
    # `pad` writes its result out in the order of its dimensions.
    order = layout_order(tensor.shape, tensor.stride())
    padded = F.pad(tensor.permute(order), (0, missing))
    return padded.permute([order.index(dim) for dim in range(tensor.dim())])


def addressable_copy(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where cuDNN cannot address it."""
    if tensor.numel() == 0 or addressable(tensor):
        return tensor
    dense = layout_like(tensor.shape, layout_of(tensor))
    copy = torch.empty_strided(dense.shape, dense.stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _bias(
    mask: Tensor, seq_q: int, seq_kv: int, dtype: torch.dtype, shifted: bool
) -> tuple[Tensor, Tensor | None]:
    mask = mask[(None,) * (4 - mask.dim())]
    for dim, stride in enumerate(mask.stride()):
        if stride == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)  # an expanded dimension: once is enough
    shift = None
    if mask.dtype == torch.bool:
        bias = torch.full_like(mask, -math.inf, dtype=dtype).masked_fill_(mask, 0)
    elif shifted:
        shift = row_shift(mask)
        bias = mask - shift
    else:
        bias = mask
    bias = bias.expand(-1, -1, -1, seq_kv).contiguous()
    if bias.data_ptr() % ALIGNMENT:
        bias = bias.clone()
    return bias.expand(-1, -1, seq_q, -1), shift


def layout_of(tensor: Tensor) -> TensorSpec:
    """Shape, strides and dtype of a tensor, as the spec has them."""
    shape = tuple(tensor.shape)
    return TensorSpec(shape, canonical_stride(shape, tensor.stride()), DTYPES[tensor.dtype])


def empty_output(query: Tensor, dim_v: int) -> Tensor:
    """An uninitialized output: PyTorch's layout where it has the query's shape, else its order."""
    if query.shape[-1] == dim_v:
        return torch.empty_like(query)
    shape = (*query.shape[:-1], dim_v)
    stride = dense_stride(shape, layout_order(query.shape, query.stride()))
    return query.new_empty_strided(shape, stride)


def writable_output(query: Tensor, value: Tensor, output: Tensor | None = None) -> Tensor | None:
    """What the output of addressable tensors is laid out like, if cuDNN can write that.

    Args:
        query, value: the tensors, of which no value is read.
        output: a tensor on ``meta`` with the layout that is wanted; None takes ours.
    """
    if output is None:
        output = empty_output(without_data(query), value.shape[-1])
    return output if addressable(output) else None


def without_data(tensor: Tensor) -> Tensor:
    """A tensor on ``meta`` with the layout of ``tensor``."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class Parts(NamedTuple):
    """One call as two that together compute the same.

    Attributes:
        halves: ``(query, key, value, mask)`` of each.
        dim: the dimension of the query that was cut, counted from the last: batch or heads.
        axis: the same counted from the first.
        bounds: where each half starts and stops.
        extent: the extent of that dimension of the whole call.
    """

    halves: list[tuple[Tensor, Tensor, Tensor, Tensor | None]]
    dim: int
    axis: int
    bounds: tuple[tuple[int, int], ...]
    extent: int

    def cut(self, tensor: Tensor) -> list[Tensor]:
        """The halves of a tensor like the output; what is broadcast goes whole into both."""
        if not self._is_cut(tensor):
            return [tensor, tensor]
        own = tensor.shape[self.dim]
        ends = ((a * own // self.extent, b * own // self.extent) for a, b in self.bounds)
        return [tensor.narrow(self.dim, start, stop - start) for start, stop in ends]

    def _is_cut(self, tensor: Tensor) -> bool:
        return tensor.dim() >= -self.dim and tensor.shape[self.dim] > 1

    def join(self, results: list[Tensor]) -> Tensor:
        """The halves' outputs or log-sum-exps put together, in their memory order."""
        return _joined(results, self.axis)

    def join_gradients(self, tensor: Tensor, gradients: list[Tensor]) -> Tensor:
        """The halves' gradients of ``tensor`` as its own."""
        if self._is_cut(tensor):
            return _joined(gradients, tensor.dim() + self.dim)
        return gradients[0] + gradients[1]


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    dims = range(parts[0].dim())
    order = sorted(dims, key=parts[0].stride, reverse=True)
    joined = torch.cat([part.permute(order) for part in parts], order.index(axis))
    return joined.permute([order.index(dim) for dim in dims])


def split(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Parts | None:
    """A call cut in two, over the batch or else over the heads; None where neither can be."""
    tensors = (query, key, value)
    batched = query.dim() == 4 and max(t.shape[0] for t in tensors) > 1
    dim = -4 if batched else -3
    extent = max(t.shape[dim] for t in tensors)
    # Heads are cut where every group of query heads keeps its key and value head.
    groups = (extent // t.shape[-3] for t in tensors if t.shape[-3] > 1)
    unit = 1 if batched else math.lcm(*groups)
    middle = extent // unit // 2 * unit
    if middle == 0:
        return None
    whole = Parts([], dim, query.dim() + dim, ((0, middle), (middle, extent)), extent)
    cuts = [whole.cut(t) for t in tensors]
    masks = [None, None] if mask is None else whole.cut(mask)
    halves = [(*half, part) for *half, part in zip(*cuts, masks, strict=True)]
    return whole._replace(halves=halves)


def outline(query: Tensor, value: Tensor, o: Options) -> Outline:
    """What the caller of these tensors gets back."""
    dim = query.shape[-1]
    scale = default_scale(dim) if o.scale is None else abs(o.scale) or 1.0
    return Outline(query.dim(), value.shape[-1], scale)


def forward_spec(
    inputs: Inputs, o: Options, scale: float, *, lse: bool, output: Tensor | None = None
) -> AttentionSpec:
    """The spec of the forward graph of prepared tensors; ``output`` has its layout, if not ours."""
    query, key, value = (layout_of(t) for t in inputs[:3])
    return AttentionSpec(
        Direction.FORWARD,
        query,
        key,
        value,
        layout_like((*query.shape[:3], value.shape[3]), query)
        if output is None
        else layout_of(output),
        scale=scale,
        bias=None if inputs.bias is None else layout_of(inputs.bias),
        causal=o.is_causal,
        dropout_p=o.dropout_p,
        lse=lse,
    )


def backward_spec(
    forward: AttentionSpec,
    grad_output: TensorSpec,
    *,
    bias_gradient: bool,
    deterministic: bool,
) -> AttentionSpec:
    """The spec of the backward graph that belongs to a forward graph."""
    grad_bias = None
    if bias_gradient:
        assert forward.bias is not None
        shape = forward.bias.shape
        grad_bias = TensorSpec(shape, contiguous_stride(shape), forward.query.dtype)
    return dataclasses.replace(
        forward,
        direction=Direction.BACKWARD,
        lse=False,
        deterministic=deterministic,
        grad_output=grad_output,
        grad_query=layout_like(forward.query.shape, forward.query),
        grad_key=layout_like(forward.key.shape, forward.key),
        grad_value=layout_like(forward.value.shape, forward.value),
        grad_bias=grad_bias,
    )


def is_half(dtype: torch.dtype) -> bool:
    """Whether cuDNN attention computes in ``dtype``."""
    return DTYPES.get(dtype) in HALF_DTYPES
