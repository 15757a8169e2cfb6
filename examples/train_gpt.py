"""Trains a GPT on characters: on a CPU, on one GPU, or with torchrun on several.

    python examples/train_gpt.py
    python examples/train_gpt.py --attention both
    torchrun --nproc-per-node 8 examples/train_gpt.py --size gpt2

Each process trains on batches of its own and gradients are averaged (DDP). ``--attention both``
trains twice from the same start on the same batches, first through `cudnn_sdpa`, then through
`F.scaled_dot_product_attention`. On a CPU both are PyTorch's.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, TEXT, Attention, Shape, read_text, save, synchronize
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cudnn_mha import cudnn_sdpa

ATTENTIONS: dict[str, Attention] = {
    "cudnn": functools.partial(cudnn_sdpa, is_causal=True),
    "pytorch": functools.partial(F.scaled_dot_product_attention, is_causal=True),
}


class Size(NamedTuple):
    """What ``--size`` stands for."""

    layers: int
    heads: int
    dim: int
    context: int
    batch: int


SIZES = {
    "tiny": Size(layers=2, heads=4, dim=32, context=64, batch=12),
    "baby": Size(layers=6, heads=6, dim=64, context=256, batch=64),
    "gpt2": Size(layers=12, heads=12, dim=64, context=1024, batch=16),
}


class Workers(NamedTuple):
    """This process among those that train together."""

    rank: int
    total: int
    device: torch.device

    def mean(self, value: Tensor) -> float:
        """The mean of a number over all processes."""
        if self.total > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value.item() / self.total


class Result(NamedTuple):
    """What a training came to."""

    train_loss: float
    validation_loss: float
    tokens_per_second: float


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--attention",
        choices=[*ATTENTIONS, "both"],
        default="cudnn",
        help="who computes it; default: %(default)s",
    )
    parser.add_argument("--size", choices=SIZES, help="of the model; default: baby, on a CPU tiny")
    parser.add_argument("--batch", type=int, help="sequences in each process; default: by size")
    parser.add_argument("--steps", type=int, default=200, help="of training; default: %(default)s")
    parser.add_argument(
        "--report", type=int, default=20, help="steps between two lines; default: %(default)s"
    )
    parser.add_argument(
        "--rate", type=float, default=1e-3, help="learning rate; default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and batches; default: %(default)s"
    )
    parser.add_argument(
        "--text", type=Path, default=TEXT, help="file to learn from; default: some sonnets"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda, if there is one")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    parser.add_argument("--save", type=Path, help="write the last model to this file")
    return parser.parse_args(argv)


def join(device: str | None) -> Workers:
    """Joins the processes that torchrun started, if it did."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rank, total = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = torch.device(kind)
    if kind == "cuda":
        place = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(place)
    if total > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return Workers(rank, total, place)


def batches(text: Tensor, size: Size, seed: int) -> tuple[Tensor, Tensor]:
    """Random stretches of a text and, for each of their tokens, the next one: ``(B, S)`` both."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
    taken = text[(starts + torch.arange(size.context + 1)).to(text.device)]
    return taken[:, :-1], taken[:, 1:]


def train(
    attend: Attention, text: Tensor, vocabulary: int, args: argparse.Namespace, workers: Workers
) -> tuple[GPT, Result]:
    """Trains a new model; the same arguments give the same start and the same batches."""
    device = workers.device
    size = SIZES[args.size or ("baby" if device.type == "cuda" else "tiny")]
    size = size._replace(batch=args.batch or size.batch)
    tail = max(len(text) // 10, size.context + 1)
    text, held_out = text[:-tail].to(device), text[-tail:].to(device)

    torch.manual_seed(args.seed)
    model = GPT(Shape(vocabulary, size.context, size.layers, size.heads, size.dim)).to(device)
    step_of: nn.Module = model
    if workers.total > 1:
        step_of = DistributedDataParallel(model)
    if args.compile:
        step_of = torch.compile(step_of)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    # cuDNN attention is for half precision, and a CPU is faster without.
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    tokens = size.batch * size.context * workers.total
    warm = min(5, args.steps // 2)  # the first steps compile plans
    loss, began = torch.zeros(()), 0.0
    for step in range(args.steps):
        if step == warm:
            synchronize(device)
            began = time.perf_counter()
        seed = args.seed + step * workers.total + workers.rank
        inputs, targets = batches(text, size, seed)
        with half:
            loss = step_of(inputs, targets, attend)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.report == 0:
            mean = workers.mean(loss.detach())
            if workers.rank == 0:
                print(f"  step {step + 1:5}  loss {mean:.4f}")
    synchronize(device)
    seconds = time.perf_counter() - began

    with torch.no_grad(), half:
        seen = [step_of(*batches(held_out, size, seed), attend) for seed in range(4)]
    return model, Result(
        workers.mean(loss.detach()),
        workers.mean(torch.stack(seen).mean()),
        tokens * (args.steps - warm) / seconds,
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Result]:
    args = arguments(argv)
    text, vocabulary = read_text(args.text)
    workers = join(args.device)
    names = [*ATTENTIONS] if args.attention == "both" else [args.attention]
    results = {}
    try:
        for name in names:
            if workers.rank == 0:
                where = f"{workers.total} x {workers.device.type}"
                print(f"{name} attention on {where}, {len(text):,} characters")
            model, results[name] = train(ATTENTIONS[name], text, vocabulary, args, workers)
            if workers.rank == 0:
                found = results[name]
                print(
                    f"{name}: loss {found.train_loss:.4f}, validation {found.validation_loss:.4f}, "
                    f"{found.tokens_per_second:,.0f} tokens/s"
                )
        if args.save and workers.rank == 0:
            save(model, args.save)
    finally:
        if workers.total > 1:
            dist.destroy_process_group()
    return results


if __name__ == "__main__":
    main()
