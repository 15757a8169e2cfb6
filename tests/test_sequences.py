"""Descriptors of ragged tensors: one for all lengths of a bucket."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from cudnn_mha import devices
from cudnn_mha.graph_builder import Uid
from cudnn_mha.sequences import (
    LEAST,
    OFFSETS,
    batch_offsets,
    bucket,
    bucket_of_tokens,
    declared,
    ragged,
)
from cudnn_mha.spec import TensorSpec
from tests.support import BACKWARD, BHSD, BSHD, attention, refusal, tensor

H200 = devices.described("h200")


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(n) for n in (0, 1, 127, 128, 129, 256, 257)] == [128] * 4 + [256, 256, 512]
    assert [bucket(n, 1) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    for size in range(1, 3000):
        assert size <= bucket(size) and bucket(size) < max(2 * size, LEAST + 1)
        assert bucket(bucket(size)) == bucket(size)


def test_buckets_of_tokens_cost_a_quarter_more_at_most() -> None:
    assert [bucket_of_tokens(n) for n in (1, 128, 129, 1024, 1025, 1281, 5000)] == [
        *(128, 128, 256, 1024, 1280, 1536, 5120)
    ]
    sizes = [bucket_of_tokens(n) for n in range(1, 20000)]
    assert all(n <= size < n + max(LEAST, n // 4 + 1) for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 30


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("order", [BSHD, (2, 0, 1, 3), (2, 1, 0, 3)])
def test_descriptors_of_token_layouts_know_no_length(heads: int, order: tuple[int, ...]) -> None:
    lengths = range(2, 250, 31)
    found = {declared(tensor((2, heads, n, 16), order=order), 2, 256) for n in lengths}
    (layout,) = found
    assert layout.shape == (2, heads, 256, 16)
    assert layout.stride[3] == 1
    if order == BSHD:
        assert layout.stride == (256 * heads * 16, 16, heads * 16, 1)
        assert declared(tensor((2, heads, 1, 16), order=order), 2, 256) == layout


def test_a_single_head_has_one_descriptor_whatever_its_stride() -> None:
    plain = tensor((2, 1, 50, 16))
    odd = plain._replace(stride=(800, 12345, 16, 1))
    assert declared(odd, 2, 128) == declared(plain, 2, 128)


def test_descriptors_do_not_overlap_where_heads_lie_outside_tokens() -> None:
    layout = declared(tensor((2, 4, 100, 16)), 2, 128)
    assert layout.stride == (6400, 1600, 16, 1)
    layout = declared(TensorSpec((2, 4, 100, 16), (1, 100_000, 16, 1), "float16"), 2, 128)
    assert layout.stride == (400_000, 100_000, 16, 1)


def test_ragged_declares_every_tensor_of_its_side() -> None:
    spec = attention(
        BACKWARD,
        heads=(4, 2, 1),
        lengths=(100, 200),
        dims=(64, 32),
        order=BSHD,
        padding=True,
        causal=True,
    )
    found = ragged(spec, 128, 256)
    for name in OFFSETS.values():
        layout = getattr(spec, name)
        length = 256 if name.removeprefix("grad_") in ("key", "value") else 128
        assert getattr(found, name) == declared(layout, 2, length), name
        assert getattr(found, name).shape[2] == length
    assert (found.ragged, found.lengths, found.padding, found.causal) == (True, True, False, True)
    forward = ragged(attention(), 128, 256)
    assert forward.grad_output is None and forward.grad_query is None


def test_specs_of_other_buckets_and_kinds_differ() -> None:
    specs = [
        ragged(attention(dtype=dtype, dims=(dim, dim), lengths=(100, 100), order=order), q, kv)
        for dtype, dim, order in itertools.product(
            ("float16", "bfloat16"), (32, 64), (BSHD, (2, 0, 1, 3))
        )
        for q, kv in ((128, 128), (128, 256), (256, 128))
    ]
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("order", [BHSD, BSHD, (2, 0, 1, 3)])
@pytest.mark.parametrize("heads", [(4, 2, 2), (1, 1, 1)])
def test_cudnn_plans_ragged_graphs(
    direction: str, order: tuple[int, ...], heads: tuple[int, int, int]
) -> None:
    spec = attention(heads=heads, lengths=(100, 200), order=order, lse=True, causal=True)
    if direction == "backward":
        spec = attention(BACKWARD, heads=heads, lengths=(100, 200), order=order, causal=True)
    assert refusal(ragged(spec, 128, 256), H200) is None


def test_offsets_are_multiples_of_the_batch_stride() -> None:
    spec = attention(BACKWARD, batch=3, heads=(4, 2, 1), lengths=(10, 20), dims=(16, 8), order=BSHD)
    spec = dataclasses.replace(spec, grad_output=tensor(spec.output.shape))
    found = batch_offsets(spec, torch.device("cpu"))
    want = {
        Uid.OFFSET_QUERY: 10 * 4 * 16,
        Uid.OFFSET_KEY: 20 * 2 * 16,
        Uid.OFFSET_VALUE: 20 * 8,
        Uid.OFFSET_OUTPUT: 10 * 4 * 8,
        Uid.OFFSET_GRAD_OUTPUT: 10 * 4 * 8,
        Uid.OFFSET_GRAD_QUERY: 10 * 4 * 16,
        Uid.OFFSET_GRAD_KEY: 20 * 2 * 16,
        Uid.OFFSET_GRAD_VALUE: 20 * 8,
        Uid.OFFSET_LSE: 10 * 4,
    }
    assert {uid: t.tolist() for uid, t in found.items()} == {
        uid: [0, stride, 2 * stride, 3 * stride] for uid, stride in want.items()
    }
    assert {t.dtype for t in found.values()} == {torch.int64}
    forward = batch_offsets(attention(), torch.device("cpu"))
    assert set(forward) == {*(uid for uid in want if "GRAD" not in uid.name)}
