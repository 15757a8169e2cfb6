"""Training on two ranks without a GPU: DDP, FSDP2, tensor parallelism, the compiler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from cudnn_mha import cudnn_sdpa
from tests.gpt import GPT, VOCABULARY, train
from tests.ranks import Ranks, device, mesh

STEPS, BATCH, LENGTH = 3, 4, 32


def wrapped(model: GPT, manner: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model as each manner of sharing its work has it."""
    if manner == "ddp":
        return DistributedDataParallel(model)
    if manner == "tensor":
        plan: dict[str, Any] = {
            **dict.fromkeys(("query", "key_value"), ColwiseParallel(use_local_output=False)),
            "project": RowwiseParallel(),
        }
        for block in model.blocks:
            parallelize_module(block, mesh(), plan)
        return model
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh(), mp_policy=policy)
    fully_shard(model, mesh=mesh(), mp_policy=policy)
    return model


def whole(parameter: Tensor) -> Tensor:
    found = parameter.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def losses_and_weights(manner: str, checkpointed: bool, compiled: bool) -> None:
    """Both are those of one process that sees all batches."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone = GPT(cudnn_sdpa).to(device())
    shared: Any = GPT(cudnn_sdpa, checkpointed=checkpointed).to(device())
    shared.load_state_dict(copy.deepcopy(alone.state_dict()))
    batches = list(torch.randint(VOCABULARY, (STEPS, BATCH, LENGTH), device=device()))
    want = train(alone, batches)

    model: Any = wrapped(shared, manner)
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    own = batches
    if manner != "tensor":  # there all ranks see all of a batch
        own = [batch.chunk(dist.get_world_size())[dist.get_rank()] for batch in batches]
    losses = torch.tensor(train(model, own))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / dist.get_world_size(), torch.tensor(want))
    for (name, one), other in zip(shared.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(one), other.detach(), atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("manner", "checkpointed", "compiled"),
    [
        ("ddp", False, False),
        ("fsdp", False, False),
        ("fsdp", True, True),
        ("tensor", True, False),
    ],
)
def test_training_on_two_ranks(
    ranks: Ranks, manner: str, checkpointed: bool, compiled: bool
) -> None:
    ranks(losses_and_weights, manner, checkpointed, compiled)
