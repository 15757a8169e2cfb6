"""The Triton kernels of `cudnn_mha.padding`, imported where there is Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["seq", "dim", "by_batch", "by_head", "by_row"])
def zero_padding(
    pointer,
    own,
    other,
    seq,
    dim,
    by_batch,
    by_head,
    by_row,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Zeros for the rows of ``(B, H, S, D)`` behind the end of their sequence."""
    batch = tl.program_id(2).to(tl.int64)
    written = tl.where(tl.load(other + batch) > 0, tl.load(own + batch), 0)
    first = tl.program_id(0) * ROWS
    if first + ROWS > written:
        row = first + tl.arange(0, ROWS)
        column = tl.arange(0, DIM)
        start = pointer + batch * by_batch + tl.program_id(1).to(tl.int64) * by_head
        place = start + row[:, None].to(tl.int64) * by_row + column[None, :]
        hidden = ((row >= written) & (row < seq))[:, None] & (column < dim)[None, :]
        tl.store(place, tl.zeros([ROWS, DIM], pointer.dtype.element_ty), mask=hidden)


@triton.jit(do_not_specialize=["count", "tokens", "size"])
def zero_gaps(
    pointer,
    offsets,
    own,
    other,
    count,
    tokens,
    size,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Zeros for the rows of ``(tokens, size)`` that belong to none of ``count`` sequences."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row * size
    # The last sequence that starts at the row or before it, found by halving; `count` is none.
    low = tl.zeros([ROWS], tl.int32)
    high = tl.zeros([ROWS], tl.int32) + count
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        reached = tl.load(offsets + middle) <= place
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    there = low < count
    keys = tl.load(other + low, mask=there, other=0)
    written = tl.where(keys > 0, tl.load(own + low, mask=there, other=0), 0)
    start = tl.load(offsets + low)
    real = (place >= start) & (place < start + written.to(tl.int64) * size)
    hidden = (row < tokens) & (real == 0)
    if tl.max(hidden.to(tl.int32), 0) != 0:
        for at in range(0, size, COLUMNS):
            column = at + tl.arange(0, COLUMNS)
            mask = hidden[:, None] & (column < size)[None, :]
            zeros = tl.zeros([ROWS, COLUMNS], pointer.dtype.element_ty)
            tl.store(pointer + place[:, None] + column[None, :], zeros, mask=mask)
