"""A cache of keys and values as FlashAttention lays it out: rotate, append, find a sequence's own.

Everything stays on the device: no length is read back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary position embedding: Su et al., "RoFormer" (2021), eq. 34.

    Args:
        x: ``(B, S, H, D)``.
        cos, sin: ``(positions, R / 2)``; the dimensions of x behind the first R stay as they are.
        positions: ``(B, S)`` int64, the row of ``cos`` and ``sin`` for each token.
        interleaved: dimensions 2i and 2i + 1 turn together, else i and i + R / 2 (GPT-NeoX).

    Returns:
        A new tensor; computed in float32 at least, as the angles' precision asks for.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[positions].to(wide).unsqueeze(2) for table in (cos, sin))
    size = 2 * cos.shape[-1]
    turning = x[..., :size].to(wide)
    if interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, -1)
    pair = (first * c - second * s, first * s + second * c)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), x[..., size:]], -1)


def append(
    cache: Tensor,
    new: Tensor,
    positions: Tensor,
    rows: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Writes the new tokens of each sequence into the cache, in place.

    Args:
        cache: ``(B', S, H, D)``, or ``(pages, page size, H, D)`` with a table.
        new: ``(B, S', H, D)``.
        positions: ``(B, S')`` int64, where in its sequence each token goes.
        rows: ``(B,)`` the cache's row of each sequence; None for one after another.
        block_table: ``(B, M)`` the pages of each sequence in order.
    """
    if block_table is not None:
        size = cache.shape[1]
        pages = block_table.long().gather(1, positions // size)
        cache[pages, positions % size] = new
        return
    if rows is None:
        rows = torch.arange(new.shape[0], device=new.device)
    cache[rows.long()[:, None], positions] = new


def own_rows(cache: Tensor, batch: int, rows: Tensor | None, leftpad: Tensor | None) -> Tensor:
    """What each of the batch's sequences has in the cache ``(B', S, H, D)``, first token first.

    A view where sequences lie one after another and begin with the cache, else a copy.
    """
    if leftpad is None:
        return cache[:batch] if rows is None else cache.index_select(0, rows)
    if rows is None:
        rows = torch.arange(batch, device=cache.device)
    index = torch.arange(cache.shape[1], device=cache.device)
    places = (index + leftpad[:, None]).clamp(max=cache.shape[1] - 1)  # beyond: never read
    return cache[rows.long()[:, None], places.long()]
