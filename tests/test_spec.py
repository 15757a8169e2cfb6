"""The description of a call: layouts, strides, equality, hash, words."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest

from cudnn_mha.spec import (
    AttentionSpec,
    TensorSpec,
    canonical_stride,
    contiguous_stride,
    default_scale,
    dense_stride,
    layout_like,
    layout_order,
)
from tests.support import BACKWARD, BSHD, FORWARD, attention, tensor

SHAPE = (2, 3, 5, 8)
ORDERS = [(*lead, 3) for lead in itertools.permutations((0, 1, 2))]


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((), ()),
        ((7,), (1,)),
        ((2, 3, 5, 8), (120, 40, 8, 1)),
        ((2, 1, 1, 8), (8, 8, 8, 1)),
        ((2, 0, 5, 8), (40, 40, 8, 1)),  # no element, yet the strides stay positive
    ],
)
def test_contiguous_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == stride
    assert TensorSpec(shape, stride, "float16").is_contiguous


@pytest.mark.parametrize(
    ("order", "stride"),
    [
        ((0, 1, 2, 3), (120, 40, 8, 1)),
        ((0, 2, 1, 3), (120, 8, 24, 1)),
        ((1, 0, 2, 3), (40, 80, 8, 1)),
        ((1, 2, 0, 3), (8, 80, 16, 1)),
        ((2, 0, 1, 3), (24, 8, 48, 1)),
        ((2, 1, 0, 3), (8, 16, 48, 1)),
    ],
)
def test_dense_strides_in_every_order(order: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert dense_stride(SHAPE, order) == stride
    assert layout_order(SHAPE, stride) == order


@pytest.mark.parametrize(
    ("shape", "stride", "canonical"),
    [
        ((2, 3, 5, 8), (120, 40, 8, 1), (120, 40, 8, 1)),  # nothing of size 1, nothing changes
        ((2, 1, 5, 8), (40, 7, 8, 1), (40, 40, 8, 1)),
        ((1, 3, 5, 8), (0, 40, 8, 1), (120, 40, 8, 1)),
        ((1, 1, 1, 8), (3, 5, 7, 1), (8, 8, 8, 1)),
        ((2, 3, 1, 8), (24, 8, 999, 1), (24, 8, 8, 1)),
        ((2, 3, 5, 1), (15, 5, 1, 77), (15, 5, 1, 1)),  # one column: its stride is 1
        ((1, 3, 5, 8), (1, 8, 24, 1), (120, 8, 24, 1)),  # above the largest of what it encloses
        ((2, 3, 1, 8), (0, 8, 5, 1), (0, 8, 8, 1)),  # a repeated dimension keeps its 0
        ((1, 1, 1, 1), (9, 9, 9, 9), (1, 1, 1, 1)),
        ((4, 1), (1, 5), (1, 1)),
        ((), (), ()),
    ],
)
def test_canonical_strides(
    shape: tuple[int, ...], stride: tuple[int, ...], canonical: tuple[int, ...]
) -> None:
    assert canonical_stride(shape, stride) == canonical
    assert canonical_stride(shape, canonical) == canonical


@pytest.mark.parametrize("order", ORDERS)
def test_layout_order_ignores_gaps(order: tuple[int, ...]) -> None:
    gapped = dense_stride((*SHAPE[:3], 24), order)
    assert layout_order(SHAPE, gapped) == order


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("how", ["repeated", "single"])
def test_dimensions_without_a_place_keep_the_one_in_the_shape(
    order: tuple[int, ...], dim: int, how: str
) -> None:
    shape, stride = list(SHAPE), list(dense_stride(SHAPE, order))
    if how == "repeated":
        stride[dim] = 0
    else:
        shape[dim], stride[dim] = 1, 10**6
    found = layout_order(shape, stride)
    assert found[dim] == dim
    assert [d for d in found if d != dim] == [d for d in order if d != dim]


@pytest.mark.parametrize("order", ORDERS)
def test_layout_like_has_the_order_and_no_gaps(order: tuple[int, ...]) -> None:
    like = TensorSpec(SHAPE, dense_stride((*SHAPE[:3], 24), order), "bfloat16")
    same = layout_like(SHAPE, like)
    assert same == TensorSpec(SHAPE, dense_stride(SHAPE, order), "bfloat16")
    wider = layout_like((2, 3, 5, 16), like, "float32")
    assert wider == TensorSpec((2, 3, 5, 16), dense_stride((2, 3, 5, 16), order), "float32")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_layout_like_of_a_dense_tensor_is_its_own(order: tuple[int, ...], dim: int) -> None:
    shape = list(SHAPE)
    shape[dim] = 1
    stride = canonical_stride(shape, dense_stride(shape, order))
    like = TensorSpec(tuple(shape), stride, "float16")
    assert layout_like(shape, like) == like


def test_layout_like_of_a_repeated_tensor_is_written_out() -> None:
    like = TensorSpec(SHAPE, (0, 8, 24, 1), "float16")
    assert layout_like(SHAPE, like).stride == (120, 8, 24, 1)


@pytest.mark.parametrize(
    ("shape", "stride", "extent"),
    [
        ((2, 3, 5, 8), (120, 40, 8, 1), 240),
        ((2, 3, 5, 8), (0, 40, 8, 1), 120),
        ((2, 3, 5, 8), (240, 80, 16, 1), 240 + 160 + 64 + 8),
        ((1, 1, 1, 1), (9, 9, 9, 9), 1),
        ((65536, 65536), (65536, 1), 2**32),
    ],
)
def test_extent(shape: tuple[int, ...], stride: tuple[int, ...], extent: int) -> None:
    assert TensorSpec(shape, stride, "float16").extent == extent


def test_equal_specs_have_equal_hashes() -> None:
    one = attention(BACKWARD, causal=True, bias=tensor((1, 4, 128, 128)))
    two = attention(BACKWARD, causal=True, bias=tensor((1, 4, 128, 128)))
    assert one is not two
    assert one == two
    assert hash(one) == hash(two)
    assert {one: "found"}[two] == "found"


def test_replaced_specs_hash_anew() -> None:
    spec = attention()
    padded = dataclasses.replace(spec, padding=True)
    assert padded != spec
    assert hash(padded) != hash(spec)
    assert hash(dataclasses.replace(padded, padding=False)) == hash(spec)


def test_the_parts_of_a_spec_by_name() -> None:
    spec = attention(batch=7, heads=(6, 2, 3), lengths=(10, 20), dims=(64, 32), order=BSHD)
    assert (spec.batch, spec.heads_q, spec.heads_k, spec.heads_v) == (7, 6, 2, 3)
    assert (spec.seq_q, spec.seq_kv, spec.dim_qk, spec.dim_v) == (10, 20, 64, 32)
    assert not spec.backward
    assert list(spec.tensors) == ["query", "key", "value", "output"]
    assert spec.tensors["output"] == tensor((7, 6, 10, 32), order=BSHD)
    backward = attention(BACKWARD, bias=tensor((1, 1, 128, 128)))
    assert backward.backward
    assert list(backward.tensors) == [
        "query",
        "key",
        "value",
        "output",
        "bias",
        "grad_output",
        "grad_query",
        "grad_key",
        "grad_value",
    ]


def test_a_spec_in_words() -> None:
    plain = attention(FORWARD, order=BSHD, dims=(64, 32))
    assert str(plain) == (
        "forward query=2x4x128x64:float16@(32768, 64, 256, 1) "
        "key=2x4x128x64:float16@(32768, 64, 256, 1) "
        "value=2x4x128x32:float16@(16384, 32, 128, 1) scale=0.125"
    )
    full = attention(
        BACKWARD,
        batch=1,
        heads=(1, 1, 1),
        bias=tensor((1, 1, 128, 128), "float32"),
        grad_bias=tensor((1, 1, 128, 128)),
        scale=2.0,
        dropout_p=0.25,
        causal=True,
        padding=True,
        deterministic=True,
    )
    assert str(full) == (
        "backward query=1x1x128x64:float16 key=1x1x128x64:float16 value=1x1x128x64:float16 "
        "bias=1x1x128x128:float32 scale=2 dropout_p=0.25 grad_bias causal padding deterministic"
    )


FIELDS: dict[str, Any] = {
    "left": 63,
    "right": 5,
    "bottom_right": True,
    "softcap": 2.5,
    "score_mod": ("add", ("mul", "score", 2.5), ("log", ("abs", "q_index"))),
    "alibi": True,
    "slopes": True,
    "sinks": True,
    "grad_sinks": True,
    "lengths": True,
    "ragged": True,
    "tokens_q": 1024,
    "tokens_kv": 2048,
    "page_table": tensor((2, 1, 5, 1), "int32"),
}


def replaced(**fields: Any) -> AttentionSpec:
    """A spec with these fields; the helper takes lengths for something else."""
    return dataclasses.replace(attention(BACKWARD), **fields)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_survives_json(name: str) -> None:
    spec = replaced(**{name: FIELDS[name]})
    again = AttentionSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert hash(again) == hash(spec)
    assert getattr(again, name) == FIELDS[name] != getattr(attention(BACKWARD), name)
    assert set(spec.to_dict()) - set(attention(BACKWARD).to_dict()) == {name}


def test_no_bound_is_another_than_0() -> None:
    spec = replaced(left=0, right=0)
    again = AttentionSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert (again.left, again.right) == (0, 0)
    assert again != replaced()


def test_default_scale() -> None:
    assert default_scale(64) == 0.125
    assert default_scale(80) == 1 / math.sqrt(80)
    assert default_scale(0) == 1.0
