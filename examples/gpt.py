"""A small GPT and its text: what `train_gpt.py`, `padded_batch.py` and `long_context.py` train.

This is no script: those three import it.

How attention is computed is an argument of the model's forward, a function of query, key and
value, each ``(B, H, S, D)``. So one model serves to compare implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

TEXT = Path(__file__).with_name("sonnets.txt")


@dataclass(frozen=True)
class Shape:
    """How large a model is.

    Attributes:
        vocabulary: number of different tokens.
        context: the longest sequence.
        layers: number of blocks.
        heads: number of heads in each.
        dim: head dimension.
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    dim: int


class Block(nn.Module):
    """Attention and a feed-forward network, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.heads * shape.dim
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.network = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        # (B, S, 3, H, D) in memory, seen as three times (B, H, S, D): nothing is copied.
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.network(x)
        return x


class GPT(nn.Module):
    """Predicts each next token from the ones before it, if ``attend`` looks at no others."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.dim
        self.tokens = nn.Embedding(shape.vocabulary, width)
        self.places = nn.Embedding(shape.context, width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, attend: Attention) -> Tensor:
        """The mean loss, over targets that are not -100.

        Args:
            tokens: ``(B, S)`` int64.
            targets: ``(B, S)`` int64, for each token the next one; -100 where there is none.
            attend: computes attention.
        """
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attend)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def read_text(path: Path = TEXT) -> tuple[Tensor, int]:
    """A text as one token for each character, ``(characters,)`` int64, and the vocabulary."""
    text = path.read_text()
    index = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([index[character] for character in text]), len(index)


def save(model: GPT, path: Path) -> None:
    """Writes a model to a file for `load`."""
    torch.save({"shape": asdict(model.shape), "state": model.state_dict()}, path)


def load(path: Path) -> GPT:
    """The model of a file, on the CPU."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model = GPT(Shape(**saved["shape"]))
    model.load_state_dict(saved["state"])
    return model


def synchronize(device: torch.device) -> None:
    """Waits for a GPU, so that a clock that is read then has seen its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    raise SystemExit(
        "this is no script: run train_gpt.py, padded_batch.py or long_context.py, which import it"
    )
