"""A GPT of two blocks whose attention is given to it, for tests of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS = 64, 64, 4


class Block(nn.Module):
    """Attention, of grouped heads, and an MLP."""

    def __init__(self, attend: Callable[..., Tensor], checkpointed: bool) -> None:
        super().__init__()
        self.attend, self.checkpointed = attend, checkpointed
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        query = self.heads(self.query(normed))
        key, value = (self.heads(t) for t in self.key_value(normed).chunk(2, -1))
        output = self.attend(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.project(output.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]

    def heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, WIDTH // HEADS))
        return heads.transpose(1, 2)


class GPT(nn.Module):
    """Tokens ``(B, S)`` in, the loss of the next tokens out."""

    def __init__(self, attend: Callable[..., Tensor], *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(attend, checkpointed) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: Any, batches: list[Tensor]) -> list[float]:
    """Losses of one step of descent for each batch.

    Plain descent, as others scale gradients: that of a key's bias is nothing but rounding.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().item())
    return losses
