"""Sharding rules of attention for ``torch.distributed.tensor``: batch and heads may be sharded.

Each head of each sequence is computed by itself, so a rank that holds some of them computes them
alone: nothing is communicated. Sequence and head dimension are gathered first; to shard the
sequence is context parallelism, which PyTorch has apart from these rules.

Query, key, value, output, log-sum-exp and gradients are placed alike. A mask is sharded with them
where it has that dimension, and replicated where it is broadcast along it; its gradient is then
the sum over the ranks. Shards may be uneven, but with fewer heads of key or value than of query
every shard must hold whole groups: heads that the ranks do not divide are gathered. Seed and
offset of dropout stay on their rank: ranks with the same generator state drop the same weights of
the heads and sequences they hold, as they do in PyTorch's own attention.

There are rules for our operators, and for ``aten::_scaled_dot_product_cudnn_attention`` and its
backward. PyTorch has rules for these two, but in 2.11 they refuse every mask, and in later
versions they shard a mask by the dimensions of the query, of which it may have fewer; in both they
part groups of heads, which makes wrong values of, say, 12 query and 3 key heads on two ranks.

PyTorch's public `register_sharding` is not enough for this: it takes no part of a call but its
tensors into the key under which a decision is kept, and a rule that PyTorch itself made for single
mesh dimensions hides what it registers. So this module uses what lies below it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)

from cudnn_mha.ops import sdpa_backward, sdpa_forward, sdpa_inference

_ATEN = torch.ops.aten
_BATCH, _HEADS = 0, 1

_Placements: TypeAlias = list[Placement | None]
"""Of the outputs, then of the tensors among the arguments, on one dimension of the mesh."""


class _Rule(NamedTuple):
    """How one operator may be sharded.

    Attributes:
        op: the operator.
        placements: those where this dimension of the query is sharded, or where none is.
        query: where the query is among the tensors.
        key: what of a call, besides its tensors, its outputs depend on.
    """

    op: OpOverload
    placements: Callable[[OpSchema, int | None], _Placements]
    query: int
    key: RuntimeSchemaInfo


def register() -> None:
    """Makes the rules known: those of our operators, and in place of PyTorch's own for cuDNN.

    Our operators register themselves when they first meet a `DTensor`, and `cudnn_mha.enable`
    calls this where ``torch.distributed.tensor`` is loaded already. Call it where that is loaded
    later, as after ``TORCH_CUDNN_MHA_ENABLED=1``. Inside of ``context_parallel`` the rules that
    PyTorch put there for its two operators stay; call it before.
    """
    register_operators()
    if _ATEN_RULES[0].op in DTensor._op_dispatcher._custom_op_handlers:
        return
    _register(_ATEN_RULES)
    _clear_python_sharding_prop_cache()
    _clear_fast_path_sharding_prop_cache()


@functools.cache
def register_operators() -> None:
    """The rules of our own operators alone."""
    _register(_OUR_RULES)


def _register(rules: tuple[_Rule, ...]) -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    for rule in rules:
        propagator.op_single_dim_strategy_funcs.pop(rule.op, None)
        propagator.register_op_strategy(rule.op, _strategy(rule), rule.key)


def _strategy(rule: _Rule) -> Callable[[OpSchema], OpStrategy]:
    def strategy(schema: OpSchema) -> OpStrategy:
        found = expand_to_full_mesh_op_strategy(
            schema.get_mesh_from_args(),
            schema,
            [rule.placements(schema, dim) for dim in (None, _BATCH, _HEADS)],
            input_index=len(rule.op._schema.returns),
        )
        found.strategies = [s for s in found.strategies if _has_whole_groups(s, rule.query)]
        return found

    return strategy


def _has_whole_groups(placed: OpSpec, query: int) -> bool:
    """Whether every key head is where the query heads are that use it."""
    assert placed.input_specs is not None
    tensors = placed.input_specs[query : query + 3]
    heads = {spec.shape[_HEADS] for spec in tensors}
    shards = tensors[0].num_shards_map[_HEADS]
    return len(heads) == 1 or all(number % shards == 0 for number in heads)


# ------------------------------------------------------------------------------------- placements


def _placed(dim: int | None) -> Placement:
    return Replicate() if dim is None else Shard(dim)


def _mask(mask: Any, dim: int | None) -> Placement:
    """Where a mask of up to 4 dimensions goes, which count from the last."""
    own = -1 if dim is None else dim - 4 + mask.ndim
    return Shard(own) if own >= 0 and mask.shape[own] != 1 else Replicate()


def _inputs(schema: OpSchema, dim: int | None, alike: int, mask: int) -> _Placements:
    """Of the arguments that are tensors: so many placed alike; others are replicated."""
    placed: _Placements = [_placed(dim)] * alike
    for number, argument in enumerate(schema.args_schema[alike:], alike):
        if isinstance(argument, OpStrategy):
            placed.append(_mask(argument, dim) if number == mask else Replicate())
    return placed


def _forward(schema: OpSchema, dim: int | None) -> _Placements:
    outputs = [_placed(dim), _placed(dim), Replicate(), Replicate()]
    return [*outputs, *_inputs(schema, dim, 3, 3)]


def _inference(schema: OpSchema, dim: int | None) -> _Placements:
    return [_placed(dim), *_inputs(schema, dim, 3, 3)]


def _backward(schema: OpSchema, dim: int | None) -> _Placements:
    mask = schema.args_schema[8]
    grad_mask: Placement = Replicate()
    if isinstance(mask, OpStrategy) and schema.kwargs_schema.get("bias_gradient"):
        grad_mask = _mask(mask, dim)
        if dim is not None and grad_mask.is_replicate():
            grad_mask = Partial()
    return [*[_placed(dim)] * 3, grad_mask, *_inputs(schema, dim, 6, 8)]


def _aten_forward(schema: OpSchema, dim: int | None) -> _Placements:
    lse = _placed(dim if schema.args_schema[4] else None)
    # Lengths, seed, offset and the debug mask are handed on as they are.
    return [_placed(dim), lse, *[None] * 7, *_inputs(schema, dim, 3, 3)]


def _aten_backward(schema: OpSchema, dim: int | None) -> _Placements:
    return [*[_placed(dim)] * 3, *_inputs(schema, dim, 6, 8)]


_OUR_RULES = (
    _Rule(sdpa_forward.default, _forward, 0, RuntimeSchemaInfo(4, ["bias_gradient"])),
    _Rule(sdpa_inference.default, _inference, 0, RuntimeSchemaInfo()),
    _Rule(sdpa_backward.default, _backward, 1, RuntimeSchemaInfo(9, ["bias_gradient"])),
)
_ATEN_RULES = (
    _Rule(
        _ATEN._scaled_dot_product_cudnn_attention.default, _aten_forward, 0, RuntimeSchemaInfo(4)
    ),
    _Rule(
        _ATEN._scaled_dot_product_cudnn_attention_backward.default,
        _aten_backward,
        1,
        RuntimeSchemaInfo(),
    ),
)
