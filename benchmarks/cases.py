"""What is compared: the cases, how much work each of them is, and what is learned of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["forward", "backward", "both"]

PEERS = {
    "ours": "cudnn_sdpa",
    "dropin": "F.sdpa while cudnn_mha is enabled",
    "cudnn": "PyTorch's cuDNN",
    "fa2": "FlashAttention-2",
    "efficient": "memory-efficient",
    "frontend": "cudnn.sdpa_torch",
    "fa4": "FlashAttention-4",
}
"""Who computes, by the short name that tables and files use."""


@dataclass(frozen=True)
class Case:
    """One attention call in bfloat16, all tensors laid out as (batch, heads, length, dimension).

    Attributes:
        group: what the case is about; "host" cases measure host time, the others device time.
        mask: "keys" hides the padding of each sequence (boolean, (B, 1, 1, Skv)); "full" adds
            random numbers to the scores (bfloat16, (B, 1, Sq, Skv)).
        backward: whether gradients are measured too.
        quick: whether ``--quick`` has it.
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


def key_lengths(case: Case) -> list[int]:
    """Keys that are no padding, for each sequence of the batch: an eighth of them up to all."""
    least, span = case.seq_kv // 8, case.seq_kv - case.seq_kv // 8
    return [least + span * i // max(1, case.batch - 1) for i in range(case.batch)]


def visible_pairs(case: Case) -> int:
    """Pairs of a query and a key that it sees, over the batch, for one head."""
    if case.mask == "keys":
        return case.seq_q * sum(key_lengths(case))
    if not case.causal:
        return case.batch * case.seq_q * case.seq_kv
    corner = min(case.seq_q, case.seq_kv)
    return case.batch * (corner * (corner + 1) // 2 + (case.seq_q - corner) * case.seq_kv)


def flops(case: Case, direction: Direction) -> float:
    """Floating-point operations that the definition needs.

    Forward ``4 * B * Hq * Sq * Skv * D``: two matrix products, a multiplication and an addition
    each. With a causal or key mask only the visible pairs count in place of ``Sq * Skv``. Backward
    2.5 times that: five matrix products, one of which recomputes the scores.
    """
    factor = {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]
    return factor * 4 * case.heads * case.dim * visible_pairs(case)


def traffic(case: Case) -> int:
    """Bytes of query, key, value and output: what a forward moves at least."""
    rows = case.heads * case.seq_q + case.kv_heads * case.seq_kv
    return 2 * 2 * case.batch * rows * case.dim


def rate(case: Case, direction: Direction, milliseconds: float) -> float:
    """Speed in `Case.unit`."""
    if case.unit == "GB/s":
        return traffic(case) / milliseconds / 1e6
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
"""Every case; the tensors of a device case take 128 MiB or more, so that L2 holds few of them."""
