"""Trains a small GPT on several GPUs, by cudnn_mha and by PyTorch's own attention, and times both.

One node, as many processes as it has GPUs, and several nodes, each with its own number in place of
0 and with the address of the first::

    torchrun --standalone --nproc-per-node 8 examples/distributed.py
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --rdzv-id gpt --rdzv-backend c10d \
        --rdzv-endpoint node0:29500 examples/distributed.py --parallel fsdp

Without GPUs it runs on the CPU through gloo, where both compute by PyTorch::

    torchrun --standalone --nproc-per-node 2 examples/distributed.py --width 96 --layers 2 \
        --length 128
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from cudnn_mha import cudnn_sdpa

VOCABULARY = 256  # bytes
WARM_UP = 2  # steps that compile plans and grow buffers

SIZES = {
    "layers": (12, "of the model"),
    "width": (768, "of a token's vector"),
    "heads": (12, "of the queries"),
    "groups": (4, "heads of keys and values"),
    "length": (2048, "tokens of a sequence"),
    "batch": (8, "sequences of each rank"),
    "steps": (50, "that are timed"),
}
"""Options that are numbers: their defaults, and what they count."""

Attend = Callable[..., Tensor]


class Block(nn.Module):
    """Attention of grouped heads, and an MLP."""

    def __init__(self, attend: Attend, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.attend, self.dim = attend, width // heads
        self.sizes = [heads, groups, groups]
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in = nn.Linear(width, sum(self.sizes) * self.dim)
        self.project_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project_in(self.norm_attention(x)).unflatten(-1, (-1, self.dim))
        query, key, value = heads.transpose(1, 2).split(self.sizes, dim=1)
        output = self.attend(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.project_out(output.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Tokens ``(B, S + 1)`` in, the loss of the last S out."""

    def __init__(self, attend: Attend, args: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, args.width)
        self.place = nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(
            Block(attend, args.width, args.heads, args.groups) for _ in range(args.layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1]) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def shared(model: nn.Module, parallel: str, device: torch.device) -> nn.Module:
    """The model with its gradients, or with all of it, shared among the ranks."""
    if parallel == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy()
    if device.type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def batch(args: argparse.Namespace, text: Tensor | None, step: int) -> Tensor:
    """Tokens ``(B, S + 1)`` that no other rank or step gets: of the text, or counting by steps."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())

    def draw(high: int) -> Tensor:
        return torch.randint(high, (args.batch, 1), generator=generator)

    places = torch.arange(args.length + 1)
    if text is None:
        return (draw(VOCABULARY) + (1 + draw(4)) * places) % VOCABULARY
    return text[draw(len(text) - args.length) + places].long()


def train(
    attend: Attend, parallel: str, args: argparse.Namespace, device: torch.device
) -> tuple[str, float]:
    """First and last loss, and tokens per second of all ranks together."""
    torch.manual_seed(0)
    text = None
    if args.text is not None:
        text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    model = shared(GPT(attend, args).to(device), parallel, device)
    if args.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    start = 0.0
    for step in range(WARM_UP + args.steps):
        if step == WARM_UP:
            wait(device)
            start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(batch(args, text, step).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    wait(device)
    seconds = time.perf_counter() - start
    ends = torch.stack([losses[0], losses[-1]])
    dist.all_reduce(ends)
    first, last = (ends / dist.get_world_size()).tolist()
    tokens = args.steps * args.batch * args.length * dist.get_world_size()
    return f"{first:.3f} -> {last:.3f}", tokens / seconds


def wait(device: torch.device) -> None:
    """Until all ranks have done all of their work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parallel",
        nargs="+",
        choices=("ddp", "fsdp"),
        default=["ddp"],
        help="what ranks share, gradients (ddp) or all of the model (fsdp); default: ddp",
    )
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    parser.add_argument("--text", type=Path, help="file to learn from; default: made up")
    for name, (default, what) in SIZES.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{what}; default: %(default)s"
        )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by `torchrun --standalone --nproc-per-node 2`, see --help")
    if args.width % args.heads or args.heads % args.groups:
        parser.error("--heads must divide --width, and --groups must divide --heads")
    return args


def main() -> None:
    args = arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    by: dict[str, Attend] = {
        "cudnn_mha": cudnn_sdpa,
        "PyTorch": F.scaled_dot_product_attention,
    }
    for parallel in args.parallel:
        if first:
            print(f"{dist.get_world_size()} x {device.type}, {parallel}", flush=True)
        for name, attend in by.items():
            losses, speed = train(attend, parallel, args, device)
            if first:
                print(f"{name:10} loss {losses}   {speed:,.0f} tokens/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
