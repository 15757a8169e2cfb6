"""Fine-tunes a model on padded batches: lengths against a mask.

    python examples/train_gpt.py --save model.pt
    python examples/padded_batch.py --model model.pt

Two copies of a model take the same steps on the same batches. One tells `cudnn_sdpa` how long each
sequence is, the other gives `F.scaled_dot_product_attention` a mask. The losses agree; what a step
takes does not.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpt import GPT, Attention, Shape, load, read_text, synchronize
from torch import Tensor

from cudnn_mha import cudnn_sdpa


class Batch(NamedTuple):
    """Sequences of different lengths, padded at their ends.

    Attributes:
        tokens: ``(B, S)``; 0 in the padding.
        targets: ``(B, S)``; -100 in the padding, of which no loss is taken.
        lengths: ``(B,)`` int32, on the device like the others.
    """

    tokens: Tensor
    targets: Tensor
    lengths: Tensor


class Result(NamedTuple):
    """What the two ways came to: losses of every step, and the median time of a step."""

    losses: dict[str, list[float]]
    milliseconds: dict[str, float]


def by_lengths(batch: Batch) -> Attention:
    """Attention that is told how long each sequence is."""
    lengths = batch.lengths
    return functools.partial(cudnn_sdpa, is_causal=True, seq_lens_q=lengths, seq_lens_kv=lengths)


def by_mask(batch: Batch) -> Attention:
    """Attention that is given a mask: a query sees real keys that are not behind it."""
    at = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    mask = (at <= at[:, None]) & (at < batch.lengths[:, None, None, None])
    return functools.partial(F.scaled_dot_product_attention, attn_mask=mask)


WAYS = {"lengths": by_lengths, "mask": by_mask}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="of train_gpt.py --save; default: a new one")
    parser.add_argument(
        "--batch", type=int, default=16 if on_gpu else 4, help="sequences; default: %(default)s"
    )
    parser.add_argument(
        "--longest", type=int, default=2048 if on_gpu else 128, help="tokens; default: %(default)s"
    )
    parser.add_argument(
        "--shortest", type=int, help="tokens; default: an eighth of the longest sequence"
    )
    parser.add_argument("--steps", type=int, default=20, help="of training; default: %(default)s")
    parser.add_argument(
        "--rate", type=float, default=1e-4, help="learning rate; default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and batches; default: %(default)s"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if on_gpu else "cpu",
        help="default: cuda, if there is one",
    )
    return parser.parse_args(argv)


def padded(text: Tensor, count: int, shortest: int, longest: int, seed: int) -> Batch:
    """Random stretches of a text, of random lengths; one of them is the longest."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator)
    lengths[0] = longest
    starts = torch.randint(len(text) - longest, (count, 1), generator=generator)
    taken = text[starts + torch.arange(longest + 1)]
    padding = torch.arange(longest) >= lengths[:, None]
    return Batch(
        taken[:, :-1].masked_fill(padding, 0),
        taken[:, 1:].masked_fill(padding, -100),
        lengths.to(torch.int32),
    )


def main(argv: Sequence[str] | None = None) -> Result:
    args = arguments(argv)
    device = torch.device(args.device)
    text, vocabulary = read_text()
    torch.manual_seed(args.seed)
    if args.model:
        start = load(args.model)
        longest = min(args.longest, start.shape.context)
    else:
        longest = args.longest
        size = Shape(vocabulary, longest, layers=2, heads=4, dim=32)
        if device.type == "cuda":
            size = replace(size, layers=4, heads=8, dim=64)
        start = GPT(size)
    shortest = args.shortest or max(longest // 8, 1)
    if not 1 <= shortest <= longest:
        raise SystemExit(f"--shortest must be from 1 to {longest}, got {shortest}")
    models = {way: copy.deepcopy(start).to(device) for way in WAYS}
    optimizers = {
        way: torch.optim.AdamW(model.parameters(), lr=args.rate) for way, model in models.items()
    }
    print(f"{args.batch} sequences of {shortest} to {longest} tokens on {device}")

    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for step in range(args.steps):
        batch = padded(text, args.batch, shortest, longest, args.seed + step)
        batch = Batch(*(tensor.to(device) for tensor in batch))
        for way, attention_of in WAYS.items():
            synchronize(device)
            began = time.perf_counter()
            with half:
                loss = models[way](batch.tokens, batch.targets, attention_of(batch))
            optimizers[way].zero_grad()
            loss.backward()
            optimizers[way].step()
            synchronize(device)
            times[way].append(time.perf_counter() - began)
            losses[way].append(loss.item())
        print(f"  step {step + 1:3}  " + "  ".join(f"{w} {losses[w][-1]:.4f}" for w in WAYS))

    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    print(f"the losses differ by at most {apart:.1e}")
    # The first step compiles plans and loads libraries.
    medians = {way: 1e3 * statistics.median(taken[1:] or taken) for way, taken in times.items()}
    for way, median in medians.items():
        print(f"{way}: {median:.2f} ms a step")
    return Result(losses, medians)


if __name__ == "__main__":
    main()
