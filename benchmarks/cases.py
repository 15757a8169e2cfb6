"""What is compared: the cases, how much work each of them is, and what is learned of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["forward", "backward", "both"]

Layout = Literal["padded", "packed", "decode"]

PEERS = {
    "ours": "cudnn_sdpa",
    "paged": "cudnn_sdpa_paged",
    "dropin": "F.sdpa while cudnn_mha is enabled",
    "cudnn": "PyTorch's cuDNN",
    "fa2": "FlashAttention-2",
    "efficient": "memory-efficient",
    "frontend": "cudnn.sdpa_torch",
    "fa4": "FlashAttention-4",
    "varlen": "PyTorch's varlen_attn",
    "flex": "compiled FlexAttention",
    "copy": "no attention: a copy of the keys, the bandwidth that the card has",
}
"""Who computes, by the short name that tables and files use."""

PLAIN = ("ours", "dropin", "cudnn", "fa2", "efficient", "frontend", "fa4")
"""Whom a call is compared with that PyTorch's function can express; the columns of its table."""

FURTHER = ("ours", "paged", "cudnn", "fa2", "efficient", "varlen", "flex", "copy")
"""The columns for the other cases; each has a few of them."""

NO_RIVALS = ("ours", "paged", "dropin", "copy")
"""No ratio is taken against these."""

LEAST, MOST = 256, 2048
"""Bounds of the lengths that `drawn_lengths` gives."""

PAGE = 64
"""Keys in a page."""


@dataclass(frozen=True)
class Case:
    """One attention call in bfloat16, all tensors laid out as (batch, heads, length, dimension).

    Attributes:
        group: what the case is about; "host" cases measure host time, the others device time.
        mask: "keys" hides the padding of each sequence (boolean, (B, 1, 1, Skv)); "full" adds
            random numbers to the scores (bfloat16, (B, 1, Sq, Skv)).
        backward: whether gradients are measured too.
        quick: whether ``--quick`` has it.
        peers: who takes part, us first; then the peer that a table's last column compares with.
        layout: "padded" and "packed" have sequences of `drawn_lengths`, each token's heads side
            by side in memory; "decode" tells the lengths of full sequences.
        window: how far back a query sees, together with ``causal``.
        softcap: bound of the scores.
    """

    group: str
    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    dim: int
    causal: bool = False
    mask: Literal["keys", "full"] | None = None
    dropout: float = 0.0
    backward: bool = True
    quick: bool = False
    peers: tuple[str, ...] = PLAIN
    layout: Layout | None = None
    window: int | None = None
    softcap: float | None = None

    @property
    def name(self) -> str:
        parts = [self.group, f"D{self.dim}"]
        parts.append(
            f"S{self.seq_q}" if self.seq_q == self.seq_kv else f"S{self.seq_q}:{self.seq_kv}"
        )
        if self.gqa:
            parts.append(f"H{self.heads}/{self.kv_heads}")
        if self.causal:
            parts.append("causal")
        return " ".join(parts)

    @property
    def gqa(self) -> bool:
        return self.heads != self.kv_heads

    @property
    def extended(self) -> bool:
        """Whether it takes more than the arguments of PyTorch's function."""
        return self.peers != PLAIN

    @property
    def columns(self) -> tuple[str, ...]:
        """The peers of the table that it stands in."""
        return FURTHER if self.extended else PLAIN

    @property
    def rival(self) -> str:
        """Whom the table's last column compares with."""
        return next(peer for peer in self.peers if peer not in NO_RIVALS)

    @property
    def host(self) -> bool:
        return self.group == "host"

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Host time is that of the forward alone and of a whole training step."""
        if self.host:
            return ("forward", "both")
        return ("forward", "backward") if self.backward else ("forward",)

    @property
    def unit(self) -> str:
        """Of `rate`: one query row does so little arithmetic that only the traffic counts."""
        return "GB/s" if self.seq_q == 1 else "TFLOP/s"


@dataclass
class Timing:
    """What was measured of one peer.

    Attributes:
        milliseconds: of one call, a number for each round; None in rounds that it sat out.
        calls: how many calls one number averages.
        late: share of the rounds in which the GPU may have waited for the host.
        error: distance of its values from the reference's.
    """

    milliseconds: list[float | None]
    calls: int
    late: float = 0.0
    error: float = 0.0


@dataclass
class Row:
    """What was learned of one direction of a case.

    Attributes:
        timings: by peer.
        refused: why a peer is not in ``timings``.
        failure: why there is nothing at all.
    """

    case: Case
    direction: Direction
    timings: dict[str, Timing] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failure: str | None = None


def drawn_lengths(case: Case) -> list[int]:
    """The lengths of the sequences of a padded or packed batch, the same in every run."""
    drawn = random.Random(1)
    most = min(MOST, case.seq_q)
    return [drawn.randint(min(LEAST, most), most) for _ in range(case.batch)]


def key_lengths(case: Case) -> list[int]:
    """Keys that are no padding, for each sequence of the batch: an eighth of them up to all."""
    least, span = case.seq_kv // 8, case.seq_kv - case.seq_kv // 8
    return [least + span * i // max(1, case.batch - 1) for i in range(case.batch)]


def visible_pairs(case: Case) -> int:
    """Pairs of a query and a key that it sees, over the batch, for one head."""
    if case.mask == "keys":
        return case.seq_q * sum(key_lengths(case))
    if case.layout in ("padded", "packed"):
        return sum(_pairs(case, length, length) for length in drawn_lengths(case))
    return case.batch * _pairs(case, case.seq_q, case.seq_kv)


def _pairs(case: Case, seq_q: int, seq_kv: int) -> int:
    """Pairs of one sequence."""
    if not case.causal:
        return seq_q * seq_kv
    seen = seq_kv if case.window is None else min(seq_kv, case.window + 1)
    if case.window is not None and seq_q > seq_kv:
        raise ValueError("a window over fewer keys than queries is not counted")
    corner = min(seq_q, seen)
    return corner * (corner + 1) // 2 + (seq_q - corner) * seen


def flops(case: Case, direction: Direction) -> float:
    """Floating-point operations that the definition needs.

    Forward ``4 * B * Hq * Sq * Skv * D``: two matrix products, a multiplication and an addition
    each. Where not every query sees every key, or some of them are padding, only the visible pairs
    count in place of ``Sq * Skv``. Backward 2.5 times that: five matrix products, one of which
    recomputes the scores.
    """
    factor = {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]
    return factor * 4 * case.heads * case.dim * visible_pairs(case)


def traffic(case: Case) -> int:
    """Bytes of query, key, value and output: what a forward moves at least."""
    rows = case.heads * case.seq_q + case.kv_heads * case.seq_kv
    size = 2 * 2 * rows * case.dim
    if case.layout in ("padded", "packed"):
        return size * sum(drawn_lengths(case)) // case.seq_q
    return size * case.batch


def moved(case: Case, peer: str) -> int:
    """Bytes that a peer's forward moves at least; a copy reads and writes the keys."""
    if peer == "copy":
        return 2 * 2 * case.batch * case.kv_heads * case.seq_kv * case.dim
    return traffic(case)


def rate(case: Case, direction: Direction, milliseconds: float, peer: str = "ours") -> float:
    """Speed in `Case.unit`."""
    if case.unit == "GB/s":
        return moved(case, peer) / milliseconds / 1e6
    return flops(case, direction) / milliseconds / 1e9


_QUICK_DENSE = {(64, 16384, True), (128, 1024, True), (128, 16384, True), (256, 4096, False)}
_DENSE = [
    # 16384 tokens and 2048 channels, whatever the shape.
    Case("dense", 16384 // s, 2048 // d, 2048 // d, s, s, d, c, quick=(d, s, c) in _QUICK_DENSE)
    for d in (64, 128, 256)
    for s in (1024, 4096, 16384)
    for c in (True, False)
]
CASES = [
    *_DENSE,
    Case("gqa", 2, 32, 8, 4096, 4096, 128, causal=True, quick=True),
    Case("gqa", 2, 32, 8, 4096, 4096, 128),
    Case("odd", 21, 32, 32, 777, 777, 64, causal=True),
    Case("odd", 21, 16, 16, 777, 777, 128),
    Case("key-mask", 16, 16, 16, 2048, 2048, 128, mask="keys", quick=True),
    Case("float-mask", 4, 16, 16, 2048, 2048, 128, mask="full"),
    Case("dropout-0.1", 4, 16, 16, 4096, 4096, 128, causal=True, dropout=0.1, quick=True),
    Case("decode", 64, 32, 8, 1, 8192, 128, backward=False, quick=True),
    Case("host", 1, 8, 8, 64, 64, 64, quick=True),
    Case("host", 1, 8, 8, 64, 64, 64, causal=True),
]
"""What PyTorch's function can say, too; the tensors of a device case take 128 MiB or more, so that
L2 holds few of them."""

_MASKED = ("ours", "cudnn", "efficient")
_VARLEN = ("ours", "varlen")
_FLEX = ("ours", "flex")
EXTENDED = [
    Case("padded", 16, 16, 16, 2048, 2048, 128, quick=True, peers=_MASKED, layout="padded"),
    Case("packed", 16, 16, 16, 2048, 2048, 128, peers=_VARLEN, layout="packed"),
    Case(
        *("packed", 16, 16, 16, 2048, 2048, 128),
        causal=True,
        quick=True,
        peers=_VARLEN,
        layout="packed",
    ),
    Case("window1024", 1, 16, 16, 16384, 16384, 128, causal=True, peers=_FLEX, window=1024),
    Case("softcap30", 1, 16, 16, 4096, 4096, 128, peers=_FLEX, softcap=30.0),
    Case("softcap30", 1, 16, 16, 4096, 4096, 128, causal=True, peers=_FLEX, softcap=30.0),
    Case(
        *("cache", 64, 32, 8, 1, 8192, 128),
        backward=False,
        quick=True,
        peers=("ours", "paged", "fa2", "copy"),
        layout="decode",
    ),
]
"""What takes our further arguments and functions."""
