"""``python -m benchmarks.padded_models``: training a Llama-like model on padded batches.

The same model of Hugging Face transformers, with the same weights and batches, under
``attn_implementation="sdpa"``, PyTorch's choice of backend, and under ``"cudnn_mha"`` with either
promise about padding. Peers take turns step by step; each meets the same new batch, whose
sequences have random lengths and are padded on the right. Losses of the first steps must agree.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BASELINE = "sdpa"
PEERS = (BASELINE, "cudnn_mha, padding='any'", "cudnn_mha, padding='ends'")
LOSS_TOLERANCE = 2**-7
"""Of losses in bfloat16 that different kernels have trained for a few steps."""


@dataclass
class Peer:
    """A model under one implementation of attention.

    Attributes:
        begin: makes the implementation the one in force.
        losses: of all steps.
        milliseconds: of the steps that were timed.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    begin: Callable[[], None]
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)

    def step(self, batch: dict[str, Tensor], *, timed: bool) -> None:
        self.begin()
        _synchronize()
        start = time.perf_counter()
        device = batch["input_ids"].device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        _synchronize()
        if timed:
            self.milliseconds.append((time.perf_counter() - start) * 1e3)
        self.losses.append(float(loss.detach()))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def build(device: torch.device, length: int, *, tiny: bool) -> Any:
    """A Llama of 8 layers whose 16 query heads share 4 key heads, or a very small one."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128 if tiny else 32000,
        hidden_size=64 if tiny else 2048,
        intermediate_size=128 if tiny else 5632,
        num_hidden_layers=2 if tiny else 8,
        num_attention_heads=4 if tiny else 16,
        num_key_value_heads=2 if tiny else 4,
        max_position_embeddings=length,
        use_cache=False,
    )
    with device:
        return transformers.LlamaForCausalLM(config)


def batch_of(
    model: Any, size: int, length: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], float]:
    """A right-padded batch with lengths from an eighth of ``length`` on, and how full it is."""
    lengths = torch.randint(length // 8, length + 1, (size,), generator=generator)
    lengths[0] = length  # a batch is as long as its longest sequence
    words = torch.randint(1, model.config.vocab_size, (size, length), generator=generator)
    real = torch.arange(length) < lengths[:, None]
    batch = {
        "input_ids": words.where(real, 0),
        "attention_mask": real.long(),
        "labels": words.where(real, -100),
    }
    return {name: t.to(model.device) for name, t in batch.items()}, float(real.float().mean())


def peers(model: Any) -> dict[str, Peer]:
    """The model once for each peer."""
    adapter: Any = importlib.import_module("cudnn_mha.integrations.transformers")
    adapter.register()
    found = {}
    for name in PEERS:
        implementation, _, promise = name.partition(", ")
        twin = copy.deepcopy(model)
        twin.set_attn_implementation(implementation)
        padding = promise.partition("=")[2].strip("'") or "any"
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-4, fused=True)
        found[name] = Peer(twin, optimizer, lambda padding=padding: adapter.register(padding))  # type: ignore[misc]
    return found


def disagreement(found: dict[str, Peer]) -> float:
    """The largest difference of losses from those of the baseline, relative to its first."""
    base = found[BASELINE].losses
    return max(
        abs(a - b) / abs(base[0])
        for peer in found.values()
        for a, b in zip(peer.losses[:4], base, strict=False)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 losses agree, 1 they do not or there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.padded_models", description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12, help="that are timed, for each peer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, for tests")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this needs an NVIDIA GPU that torch can use; none is here", file=sys.stderr)
        return 1
    model = build(torch.device(options.device), options.length, tiny=options.tiny)
    found = peers(model)
    generator = torch.Generator().manual_seed(1)
    fills = []
    for turn in range(3 + options.steps):
        batch, fill = batch_of(model, options.batch, options.length, generator)
        fills.append(fill)
        order = list(found.values())
        for peer in order[:: -1 if turn % 2 else 1]:
            peer.step(batch, timed=turn >= 3)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{where}, torch {torch.__version__}, batch {options.batch} x {options.length}, "
        f"{statistics.mean(fills):.0%} real tokens; medians of {options.steps} steps"
    )
    base = found[BASELINE]
    for name, peer in found.items():
        pairs = zip(peer.milliseconds, base.milliseconds, strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{name:28} {statistics.median(peer.milliseconds):9.2f} ms {ratio:7.3f}")
    apart = disagreement(found)
    agrees = apart <= LOSS_TOLERANCE
    print(f"losses are {apart:.3%} apart" + ("" if agrees else f", more than {LOSS_TOLERANCE:.2%}"))
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
