"""Which keys a query of a Hugging Face model sees, said in terms that need no mask of all scores.

A model asks for its mask once a forward and hands it to every layer. What it gets here is a tensor
like any other, ``(B, 1, Sq, Skv)`` and boolean, but one without memory: it holds a `Pattern`, and
turns into numbers only if somebody computes with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_masking: Any = importlib.import_module("transformers.masking_utils")


class Sequences(NamedTuple):
    """Where sequences lie among the tokens of a batch, its rows one after another.

    Attributes:
        starts: ``(N + 1,)`` tokens at which the slots of the sequences start, and where all end.
        lengths: ``(N,)`` how much of its slot a sequence fills; None for all of it.
        longest: no sequence is longer.
        order: ``(T,)`` which token goes to each place first; None where all stay where they are.
        places: ``(T,)`` the place of each token, the inverse of ``order``.
    """

    starts: Tensor
    lengths: Tensor | None
    longest: int
    order: Tensor | None = None
    places: Tensor | None = None


@dataclass(eq=False)
class Pattern:
    """Which keys each query sees.

    With ``d = i - j + shift``, query i sees key j where ``-right <= d <= left``, both belong to
    the same segment, and the key is kept; each condition is missing where it is None.

    Attributes:
        batch, seq_q, seq_kv: of the scores ``(B, H, Sq, Skv)``.
        device: of the tensors.
        left, right: bounds of the distance; right is 0 in causal attention.
        shift: the position of the first query, counted from the first key.
        kept: ``(B, Skv)`` bool, False for keys that nobody sees: padding.
        runs: the kept keys of each sequence are known to lie together.
        segments: ``(B, S)`` integers that do not decrease, of queries and keys alike.
    """

    batch: int
    seq_q: int
    seq_kv: int
    device: torch.device
    left: int | None = None
    right: int | None = None
    shift: int = 0
    kept: Tensor | None = None
    runs: bool = False
    segments: Tensor | None = None
    _dense: Tensor | None = field(default=None, init=False, repr=False)
    _sequences: Sequences | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.left is not None and self.left >= self.seq_q - 1 + self.shift:
            self.left = None
        if self.right is not None and self.right >= self.seq_kv - 1 - self.shift:
            self.right = None

    @property
    def bounded(self) -> bool:
        return self.left is not None or self.right is not None

    def within(self, distance: Tensor) -> Tensor:
        """Which distances of a query from a key are within the bounds."""
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            seen = seen & (distance <= self.left)
        if self.right is not None:
            seen = seen & (distance >= -self.right)
        return seen

    @property
    def one_sided(self) -> bool:
        """Queries and keys are the same tokens, and each query sees none behind it."""
        return self.right == 0 and self.shift == 0 and self.seq_q == self.seq_kv

    @property
    def dense(self) -> Tensor:
        """The mask ``(B, 1, Sq, Skv)``, bool, made once for all layers."""
        if torch.compiler.is_compiling():
            return self._made_dense()
        if self._dense is None:
            self._dense = self._made_dense()
        return self._dense

    def _made_dense(self) -> Tensor:
        seen = torch.ones((), dtype=torch.bool, device=self.device)
        if self.bounded:
            query = torch.arange(self.seq_q, device=self.device)[:, None] + self.shift
            seen = self.within(query - torch.arange(self.seq_kv, device=self.device))
        if self.segments is not None:
            seen = seen & (self.segments[:, None, :, None] == self.segments[:, None, None])
        if self.kept is not None:
            seen = seen & self.kept[:, None, None]
        return seen.expand(self.batch, 1, self.seq_q, self.seq_kv)

    @property
    def sequences(self) -> Sequences | None:
        """The segments, or what is kept of each row; None where neither is said."""
        if self._sequences is None:
            if self.segments is not None:
                self._sequences = _segments(self.segments)
            elif self.kept is not None:
                self._sequences = _runs(self.kept) if self.runs else _gathered(self.kept)
        return self._sequences


def rows(batch: int, length: int, device: torch.device) -> Sequences:
    """The rows of a batch without padding."""
    return Sequences(torch.arange(batch + 1, device=device) * length, None, length)


def _runs(kept: Tensor) -> Sequences:
    """Sequences that lie together and may stay where they are: the rest are gaps."""
    batch, length = kept.shape
    first = kept.int().argmax(1) + torch.arange(batch, device=kept.device) * length
    starts = torch.nn.functional.pad(first, (0, 1), value=batch * length)
    return Sequences(starts, kept.sum(1), length)


def _gathered(kept: Tensor) -> Sequences:
    """Kept tokens in their order, those of all sequences one after another, then the others."""
    length = kept.shape[1]
    flat = kept.flatten()
    before = flat.cumsum(0)  # kept ones up to here
    index = torch.arange(flat.shape[0], device=kept.device)
    places = torch.where(flat, before - 1, before[-1] + index - before)
    order = torch.empty_like(places).scatter_(0, places, index)
    starts = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    return Sequences(starts, None, length, order, places)


def _segments(segments: Tensor) -> Sequences:
    """Each segment a sequence. Their number is read on the host."""
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = first.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(starts, (0, 1), value=segments.numel())
    return Sequences(starts, None, int(starts.diff().max()))


def one_run_each(kept: Tensor) -> Tensor:
    """Whether the kept ones of every row lie together; a tensor of no dimension."""
    rises = kept[:, 0].int() + (kept[:, 1:] & ~kept[:, :-1]).sum(1)
    return (rises <= 1).all()


_ATEN = torch.ops.aten
_ARITHMETIC = {_ATEN.add, _ATEN.add_, _ATEN.sub, _ATEN.sub_, _ATEN.rsub, _ATEN.mul, _ATEN.mul_}
"""What is done with masks that are added to the scores, and to none that says what is seen."""


class PatternMask(Tensor):
    """The boolean mask ``(B, 1, Sq, Skv)`` of a pattern, computed where it is computed with."""

    pattern: Pattern

    @staticmethod
    def __new__(cls, pattern: Pattern) -> PatternMask:
        shape = (pattern.batch, 1, pattern.seq_q, pattern.seq_kv)
        mask: PatternMask = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=pattern.device
        )
        mask.pattern = pattern
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "overloadpacket", None) in _ARITHMETIC:
            raise ValueError(
                f"this model computes its attention itself ({func}), and takes a boolean mask for "
                "numbers; load it with attn_implementation='eager'"
            )

        def plain(value: Any) -> Any:
            return value.pattern.dense if isinstance(value, PatternMask) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PatternMask({self.pattern})"


class Bounds(NamedTuple):
    """What a mask function of transformers says, where it is one that is known."""

    left: int | None = None
    right: int | None = None
    segments: Tensor | None = None
    by_position: bool = False  # distances are those of position_ids: the same within a segment


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    """What a closure has captured, by name."""
    cells = function.__closure__ or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


# Each closure of one of these functions runs the same code.
_AND = _masking.and_masks(_masking.causal_mask_function).__code__
_WINDOW = _masking.sliding_window_overlay(1).__code__
_TWO_SIDED = _masking.sliding_window_bidirectional_overlay(1).__code__
_PACKED = _masking.packed_sequence_mask_function(None).__code__
_remap = getattr(_masking, "remap_positions_for_packed_sequence", None)  # newer ones
_BY_POSITION = None if _remap is None else _remap(_masking.causal_mask_function, None).__code__


def bounds_of(function: Callable[..., Any]) -> Bounds | None:
    """What a mask function means, or None where it is none of those that bounds can say."""
    bounds = _bounds_of(function)
    if bounds is not None and bounds.by_position and bounds.segments is None:
        return None
    return bounds


def _bounds_of(function: Callable[..., Any]) -> Bounds | None:
    if function is _masking.causal_mask_function:
        return Bounds(right=0)
    if function is _masking.bidirectional_mask_function:
        return Bounds()
    code = getattr(function, "__code__", None)
    if code is _WINDOW:  # so many keys up to the query itself
        return Bounds(left=_captured(function)["sliding_window"] - 1)
    if code is _TWO_SIDED:
        window = _captured(function)["sliding_window"]
        return Bounds(left=window, right=window)
    if code is _PACKED:
        return Bounds(segments=_captured(function)["packed_sequence_mask"])
    if code is not None and code is _BY_POSITION:
        inner = _bounds_of(_captured(function)["mask_function"])
        return None if inner is None else inner._replace(by_position=True)
    if code is not _AND:
        return None
    both = Bounds()
    for part in map(_bounds_of, _captured(function)["mask_functions"]):
        if part is None or (part.segments is not None and both.segments is not None):
            return None
        both = Bounds(
            _least(both.left, part.left),
            _least(both.right, part.right),
            part.segments if both.segments is None else both.segments,
            both.by_position or part.by_position,
        )
    return both


def _least(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)
