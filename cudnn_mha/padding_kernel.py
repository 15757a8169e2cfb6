"""The Triton kernel of `cudnn_mha.padding`, imported where there is Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["seq", "dim", "by_batch", "by_head", "by_row", "real_by_batch"])
def zero_rows(
    pointer,
    real,
    seq,
    dim,
    by_batch,
    by_head,
    by_row,
    real_by_batch,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Zeros for the rows of ``(B, H, S, D)`` whose flag in ``(B, S)`` is not set."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(2).to(tl.int64)
    flag = tl.load(real + batch * real_by_batch + row, mask=row < seq, other=1).to(tl.int32)
    if tl.min(flag, 0) == 0:
        column = tl.arange(0, DIM)
        start = pointer + batch * by_batch + tl.program_id(1).to(tl.int64) * by_head
        place = start + row[:, None].to(tl.int64) * by_row + column[None, :]
        hidden = (flag == 0)[:, None] & (column < dim)[None, :]
        tl.store(place, tl.zeros([ROWS, DIM], pointer.dtype.element_ty), mask=hidden)
