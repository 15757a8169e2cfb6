"""Random calls over the whole surface on the GPU, against float64.

``CUDNN_MHA_CALLS`` sets how many (default 240), ``CUDNN_MHA_SEED`` which.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

from tests.oracle import Call, failures

pytestmark = pytest.mark.gpu

CALLS = int(os.environ.get("CUDNN_MHA_CALLS", "240"))
SEED = int(os.environ.get("CUDNN_MHA_SEED", "0"))
CHUNKS = 24
LENGTHS = [1, 2, 3, 7, 16, 31, 63, 64, 65, 96, 127, 128, 129, 192, 200, 255, 256, 320, 384, 777]
DIMS = [4, 8, 16, 20, 32, 40, 64, 72, 80, 96, 128, 136, 192, 256]


def random_tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal values in a random memory order, perhaps with gaps or off its alignment."""
    order = rng.choice([(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)])
    gap = rng.choice([0, 0, 0, 8, 3])
    stored = [shape[d] for d in order]
    stored[-1] += gap
    offset = rng.choice([0, 0, 0, 8, 1])
    count = torch.Size(stored).numel()
    flat = torch.randn(count + offset, device="cuda").to(dtype)[offset:]
    tensor = flat.view(stored)[..., : stored[-1] - gap].permute([order.index(d) for d in range(4)])
    for dim in (0, 1, 2):
        if rng.random() < 0.03:
            tensor = tensor.narrow(dim, 0, 1).expand(shape)
    return tensor


def random_mask(rng: random.Random, scores: tuple[int, ...]) -> Tensor:
    shape = tuple(n if rng.random() < 0.6 else 1 for n in scores)
    shape = shape[rng.choice([0, 0, 0, 1, 2]) :]
    kind = rng.choice(["bool", "bool", "float32", "bfloat16", "float16"])
    if kind == "bool":
        mask = torch.rand(shape, device="cuda") < rng.choice([0.2, 0.7, 0.95])
    else:
        mask = torch.randn(shape, device="cuda").to(getattr(torch, kind))
        if rng.random() < 0.3:
            mask = mask.masked_fill(torch.rand(shape, device="cuda") < 0.4, -torch.inf)
        elif rng.random() < 0.5:
            mask.requires_grad_()
    if rng.random() < 0.2 and not mask.requires_grad:
        mask = mask.expand(scores)
    return mask


def random_call(rng: random.Random) -> Call:
    dtype = rng.choice([torch.bfloat16, torch.float16])
    batch = rng.choice([1, 1, 2, 3, 5])
    heads_k, heads_v = rng.choice([(1, 1), (2, 2), (3, 3), (1, 2), (4, 2), (4, 4)])
    heads = max(heads_k, heads_v) * rng.choice([1, 1, 2, 3])
    lengths = rng.choice(LENGTHS), rng.choice(LENGTHS)
    if lengths == (1, 1):
        lengths = (1, 64)  # refused: cuDNN has no backward for it
    dim = rng.choice(DIMS)
    dim_v = dim if rng.random() < 0.7 else rng.choice(DIMS)
    options: dict[str, object] = {"enable_gqa": True}
    mask = None
    choice = rng.random()
    if choice < 0.3:
        options["is_causal"] = True
    elif choice < 0.7:
        mask = random_mask(rng, (batch, heads, *lengths))
    if rng.random() < 0.3:
        options["scale"] = rng.choice([0.02, 0.2, 1.0])
    if rng.random() < 0.1:
        options["deterministic"] = True
    call = Call(
        random_tensor(rng, (batch, heads, lengths[0], dim), dtype),
        random_tensor(rng, (batch, heads_k, lengths[1], dim), dtype),
        random_tensor(rng, (batch, heads_v, lengths[1], dim_v), dtype),
        mask,
        random_tensor(rng, (batch, heads, lengths[0], dim_v), dtype),
        options,
    )
    if rng.random() < 0.15:  # scores far below zero
        call.query = call.query.clone()
        call.key = call.key.clone()
        call.query[..., 0] = 1
        call.key[..., 0] = -rng.choice([30, 90, 150]) / (options.get("scale") or dim**-0.5)  # type: ignore[operator]
    return call


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_calls(chunk: int) -> None:
    wrong = []
    for number in range(chunk, CALLS, CHUNKS):
        rng = random.Random(SEED * 1_000_003 + number)
        torch.manual_seed(rng.getrandbits(32))
        call = random_call(rng)
        try:
            found = failures(call)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            mask = None if call.mask is None else (tuple(call.mask.shape), call.mask.dtype)
            shapes = [(tuple(t.shape), t.stride()) for t in (call.query, call.key, call.value)]
            wrong.append(f"{number}: {shapes} mask {mask} {call.options}: {found}")
    assert not wrong, "\n".join(wrong)
