"""One frozen, hashable description of one attention call.

Everything below the edge of the package reads an `AttentionSpec` and nothing else: the support
checks, the graph builder, the cache key, the log line and the error message. It therefore holds
every property that a compiled plan bakes in, and never a tensor.

Letters: B batch, H heads, S sequence length, D head dimension; ``q`` and ``kv`` tell the sides
apart. Shapes are (B, H, S, D); strides count elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

from cudnn_mha.expressions import Expression, from_lists, text, to_lists

ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class Direction(str, Enum):
    """Which of the two graphs of one attention call."""

    FORWARD = "forward"
    BACKWARD = "backward"


class TensorSpec(NamedTuple):
    """Shape, strides (in elements) and dtype name of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        dims = "x".join(map(str, self.shape))
        return f"{dims}:{self.dtype}" + ("" if self.is_contiguous else f"@{self.stride}")

    @property
    def is_contiguous(self) -> bool:
        return self.stride == contiguous_stride(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first to one past the last that the strides reach."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class AttentionSpec:
    """One attention call as cuDNN sees it.

    Attributes:
        direction: forward or backward graph.
        query: ``(B, Hq, Sq, Dqk)``, as are all tensors, in any memory layout.
        key: ``(B, Hk, Skv, Dqk)``; Hk divides Hq.
        value: ``(B, Hv, Skv, Dv)``; Hv divides Hq and may differ from Hk.
        output: ``(B, Hq, Sq, Dv)``.
        scale: factor on the scores, before the bias.
        bias: additive bias, each dimension 1 or that of ``(B, Hq, Sq, Skv)``.
        causal: key j is visible to query i where j is not right of i's diagonal, j <= i.
        left: so many keys before the diagonal are visible, None for all of them.
        right: so many keys after the diagonal are visible, None for all of them; unless causal.
        bottom_right: the diagonal ends in the last query and the last key, not starts in the
            first ones; with lengths, those of each sequence.
        softcap: c where scores s become c * tanh(s / c) before all masks, 0 for none.
        score_mod: what scaled scores become before the soft cap, None where they stay.
        alibi: the paper's slopes by cuDNN's own mask; causal and top-left only.
        slopes: slopes of ALiBi are an operand, ``(1, Hq, 1, 1)`` float32.
        sinks: a logit without a key for each query head is an operand, ``(1, Hq, 1, 1)`` float32.
        dropout_p: probability that an attention weight is dropped.
        lse: the forward graph also returns the log-sum-exp ``(B, Hq, Sq, 1)``.
        padding: the graph is told the full lengths through a padding mask; the meaning is the
            same, some faulty kernels then take their correct path.
        lengths: real lengths of the sequences are operands, ``(B, 1, 1, 1)`` int32 for each side;
            Sq and Skv are what they are at most.
        ragged: where each sequence starts is an operand for every tensor, in elements,
            ``(B + 1, 1, 1, 1)`` int64; the batch strides address nothing. The log-sum-exp then
            lies as ``(tokens, Hq)`` in memory. With lengths only.
        tokens_q, tokens_kv: most tokens of all sequences together, which bounds the workspace of
            a ragged backward; None for no bound.
        page_table: ``(B, 1, M, 1)`` int32: the pages of each sequence's keys and values; key and
            value are the pool, ``(pages, H, page size, D)``. With lengths only.
        deterministic: the backward graph must give bit-equal gradients on every run.
        grad_output, grad_query, grad_key, grad_value: layouts of the backward graph's tensors.
        grad_bias: layout of the bias gradient where it is wanted.
        grad_sinks: the gradient of the sinks is wanted.
    """

    direction: Direction
    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    output: TensorSpec
    scale: float
    bias: TensorSpec | None = None
    causal: bool = False
    dropout_p: float = 0.0
    lse: bool = False
    padding: bool = False
    deterministic: bool = False
    grad_output: TensorSpec | None = None
    grad_query: TensorSpec | None = None
    grad_key: TensorSpec | None = None
    grad_value: TensorSpec | None = None
    grad_bias: TensorSpec | None = None
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    softcap: float = 0.0
    score_mod: Expression | None = None
    alibi: bool = False
    slopes: bool = False
    sinks: bool = False
    grad_sinks: bool = False
    lengths: bool = False
    ragged: bool = False
    tokens_q: int | None = None
    tokens_kv: int | None = None
    page_table: TensorSpec | None = None
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        values = tuple(v for k, v in self.__dict__.items() if k != "_hash")
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:  # the spec is hashed on every call, so its hash is kept
        return self._hash

    def to_dict(self) -> dict[str, Any]:
        """The same in lists, numbers and texts, for JSON; what is not set is left out."""
        found: dict[str, Any] = {"direction": self.direction.value}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, TensorSpec):
                shape, stride, dtype = value
                found[each.name] = {"shape": [*shape], "stride": [*stride], "dtype": dtype}
            elif each.name == "score_mod" and value is not None:
                found[each.name] = to_lists(value)
            elif each.init and each.name != "direction" and value != each.default:
                found[each.name] = value
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """The spec that `to_dict` made this of.

        Raises:
            ValueError: it is not of that form; says what is wrong.
        """
        given = dict(data)
        try:
            direction = Direction(given.pop("direction"))
            for name, value in given.items():
                if isinstance(value, Mapping):
                    shape, stride = (tuple(map(int, value[k])) for k in ("shape", "stride"))
                    given[name] = TensorSpec(shape, stride, str(value["dtype"]))
                elif name == "score_mod":
                    given[name] = from_lists(value)
            return cls(direction, **given)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no attention spec ({error!r}): {data!r}") from error

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def heads_q(self) -> int:
        return self.query.shape[1]

    @property
    def heads_k(self) -> int:
        return self.key.shape[1]

    @property
    def heads_v(self) -> int:
        return self.value.shape[1]

    @property
    def seq_q(self) -> int:
        return self.query.shape[2]

    @property
    def seq_kv(self) -> int:
        pages = 1 if self.page_table is None else self.page_table.shape[2]
        return self.key.shape[2] * pages

    @property
    def dim_qk(self) -> int:
        return self.query.shape[3]

    @property
    def dim_v(self) -> int:
        return self.value.shape[3]

    @property
    def backward(self) -> bool:
        return self.direction is Direction.BACKWARD

    @property
    def banded(self) -> bool:
        """Whether the distance from the diagonal decides what is visible."""
        return self.causal or self.left is not None or self.right is not None

    @property
    def modified(self) -> bool:
        """Whether the scores go through operations of our own, which then also mask them."""
        return self.softcap > 0 or self.score_mod is not None or self.slopes

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """The tensors that exist in this call, by name."""
        return {k: v for k, v in self.__dict__.items() if isinstance(v, TensorSpec)}

    def __str__(self) -> str:
        parts = [self.direction.value]
        parts += [f"{name}={getattr(self, name)}" for name in ("query", "key", "value")]
        if self.bias is not None:
            parts.append(f"bias={self.bias}")
        parts.append(f"scale={self.scale:g}")
        if self.dropout_p:
            parts.append(f"dropout_p={self.dropout_p:g}")
        if self.grad_bias is not None:
            parts.append("grad_bias")
        parts += [
            f"{n}={getattr(self, n)}" for n in ("left", "right") if getattr(self, n) is not None
        ]
        if self.softcap:
            parts.append(f"softcap={self.softcap:g}")
        if self.score_mod is not None:
            parts.append(f"score_mod={text(self.score_mod)}")
        if self.page_table is not None:
            parts.append(f"page_table={self.page_table}")
        parts += [name for name in _FLAGS if getattr(self, name)]
        return " ".join(parts)


_FLAGS = (
    "causal",
    "bottom_right",
    "alibi",
    "slopes",
    "sinks",
    "grad_sinks",
    "lse",
    "padding",
    "lengths",
    "ragged",
    "deterministic",
)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``."""
    return dense_stride(shape, range(len(shape)))


def dense_stride(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides that lay ``shape`` out without gaps, ``order`` naming the outermost first."""
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def canonical_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides with those of size-1 dimensions set to what a dense layout would have.

    The stride of a dimension of size 1 addresses nothing, yet PyTorch leaves any number there:
    cuDNN refuses some of these numbers, and each would cost a plan of its own.
    """
    result = list(stride)
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            inner = [result[d] * shape[d] for d in range(dim + 1, len(shape)) if shape[d] > 1]
            result[dim] = max(inner, default=1)
    if shape and shape[-1] == 1:
        result[-1] = 1
    return tuple(result)


def layout_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost in memory, the last one kept innermost.

    Dimensions of size 1 and broadcast dimensions (stride 0) have no place in memory; they keep
    their place in the shape.
    """
    lead = range(len(shape) - 1)
    placed = [d for d in lead if shape[d] > 1 and stride[d] != 0]
    placed.sort(key=lambda d: stride[d], reverse=True)
    order = iter(placed)
    taken = set(placed)
    return (*(next(order) if d in taken else d for d in lead), len(shape) - 1)


def layout_like(shape: Sequence[int], like: TensorSpec, dtype: str | None = None) -> TensorSpec:
    """A dense layout for ``shape`` in the dimension order of ``like``.

    The strides of ``like`` itself where it has the same shape and no gaps.
    """
    stride = dense_stride(shape, layout_order(like.shape, like.stride))
    return TensorSpec(tuple(shape), canonical_stride(shape, stride), dtype or like.dtype)


def default_scale(dim_qk: int) -> float:
    """``1/sqrt(Dqk)``, the default of ``F.scaled_dot_product_attention``."""
    return 1.0 / math.sqrt(dim_qk) if dim_qk else 1.0
