"""Trains on one long sequence: a sliding window against full attention and FlexAttention.

    python examples/long_context.py --length 32768 --window 1024

A query sees itself and the ``window - 1`` keys before it. `cudnn_sdpa` is told so by
``window=(window - 1, 0)``; FlexAttention by a block mask, PyTorch's function by a mask of all
scores. A step is the forward and the backward of a small model.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpt import GPT, Attention, Shape, read_text, synchronize
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cudnn_mha import cudnn_sdpa


class Result(NamedTuple):
    """What one way of attention came to; memory is None where there is no GPU to ask."""

    loss: float
    milliseconds: float
    peak_bytes: int | None


def full(length: int, window: int, device: torch.device) -> Attention:
    """Every key before the query."""
    return functools.partial(cudnn_sdpa, is_causal=True)


def windowed(length: int, window: int, device: torch.device) -> Attention:
    """The window, told to cuDNN."""
    return functools.partial(cudnn_sdpa, is_causal=True, window=(window - 1, 0))


def flex(length: int, window: int, device: torch.device) -> Attention:
    """The window as a block mask; the kernel is compiled for it."""

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < window)

    blocks = create_block_mask(seen, None, None, length, length, device=str(device))
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=blocks)


def mask(length: int, window: int, device: torch.device) -> Attention:
    """The window as a mask of all scores, which grows with the square of the length."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at
    return functools.partial(
        F.scaled_dot_product_attention, attn_mask=(distance >= 0) & (distance < window)
    )


WAYS: dict[str, Callable[[int, int, torch.device], Attention]] = {
    "full": full,
    "window": windowed,
    "flex": flex,
    "mask": mask,
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--length", type=int, default=16384 if on_gpu else 512, help="tokens; default: %(default)s"
    )
    parser.add_argument(
        "--window", type=int, default=1024 if on_gpu else 64, help="keys; default: %(default)s"
    )
    # FlexAttention has no backward on a CPU.
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=WAYS,
        default=["full", "window", "flex" if on_gpu else "mask"],
        metavar="WAY",
        help=f"some of {', '.join(WAYS)}; default: full, window and flex, on a CPU mask for flex",
    )
    parser.add_argument("--layers", type=int, default=2, help="of the model; default: %(default)s")
    parser.add_argument(
        "--heads",
        type=int,
        default=8 if on_gpu else 2,
        help="of 128 dimensions each; default: %(default)s",
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="that are timed; default: %(default)s"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if on_gpu else "cpu",
        help="default: cuda, if there is one",
    )
    args = parser.parse_args(argv)
    if args.device == "cpu" and "flex" in args.attention:
        parser.error("FlexAttention has no backward on a CPU; choose among the other ways")
    if args.window < 1:
        parser.error(f"--window must be at least 1, got {args.window}")
    return args


def measure(
    model: GPT, tokens: Tensor, targets: Tensor, attend: Attention, steps: int
) -> tuple[float, list[float]]:
    """The loss, and the seconds of each of ``steps`` steps after one that is not counted."""
    half = torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda")
    times = []
    for _ in range(1 + steps):
        synchronize(tokens.device)
        began = time.perf_counter()
        model.zero_grad()
        with half:
            loss: Tensor = model(tokens, targets, attend)
        loss.backward()
        synchronize(tokens.device)
        times.append(time.perf_counter() - began)
    return loss.item(), times[1:]


def main(argv: Sequence[str] | None = None) -> dict[str, Result]:
    args = arguments(argv)
    device = torch.device(args.device)
    text, vocabulary = read_text()
    text = text.repeat(args.length // len(text) + 2)[: args.length + 1].to(device)
    tokens, targets = text[None, :-1], text[None, 1:]
    torch.manual_seed(0)
    model = GPT(Shape(vocabulary, args.length, args.layers, args.heads, dim=128)).to(device)
    print(f"{args.length:,} tokens, a window of {args.window:,}, on {device}")

    results = {}
    for way in args.attention:
        attend = WAYS[way](args.length, args.window, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss, times = measure(model, tokens, targets, attend, args.steps)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        results[way] = found = Result(loss, 1e3 * statistics.median(times), peak)
        memory = "" if peak is None else f", {peak / 2**30:.2f} GiB at most"
        print(f"{way}: loss {loss:.4f}, {found.milliseconds:.2f} ms a step{memory}")
    return results


if __name__ == "__main__":
    main()
