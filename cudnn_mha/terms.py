"""What a call may ask for beyond `F.scaled_dot_product_attention`, without its tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cudnn_mha.expressions import LARGEST, Expression
from cudnn_mha.spec import AttentionSpec

FAR = 2**31 - 1
"""More keys than any sequence has."""

ALIGNMENTS = ("top_left", "bottom_right")

Wishes = tuple[str, tuple[int, int] | None, float | None, bool]
"""A caller's causal_alignment, window, softcap and alibi, as `make_terms` takes them."""


@dataclass(frozen=True)
class Terms:
    """Which keys a query sees, and what is done to its scores.

    With ``d = i - j``, plus ``Skv - Sq`` where the diagonal ends in the bottom right corner, query
    i sees key j where ``-right <= d <= left``; each bound is missing where it is None.

    Attributes:
        left: keys that are visible before the diagonal.
        right: keys that are visible after the diagonal; 0 for causal attention.
        bottom_right: the diagonal ends in the bottom right corner of the scores, or of those of
            each sequence where there are lengths; else it starts in the top left corner.
        softcap: scores s become ``softcap * tanh(s / softcap)``; 0 leaves them.
        alibi: the scores are biased by the distance from the diagonal.
        score_mod: what the scores become before all of that, None where they stay.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    softcap: float = 0.0
    alibi: bool = False
    score_mod: Expression | None = None

    @property
    def window(self) -> tuple[int, int]:
        """The bounds as FlashAttention counts them, -1 for a missing one."""
        return (
            -1 if self.left is None else self.left,
            -1 if self.right is None else self.right,
        )

    def within(self, seq_q: int, seq_kv: int, *, lengths: bool) -> Terms:
        """The same for scores ``(Sq, Skv)``, without what makes no difference there.

        Args:
            seq_q, seq_kv: the lengths, or the most they can be.
            lengths: sequences may be shorter.
        """
        terms = self
        if seq_q == seq_kv and not lengths:
            terms = dataclasses.replace(terms, bottom_right=False)
        before = (seq_kv if terms.bottom_right else seq_q) - 1
        after = (seq_q if terms.bottom_right else seq_kv) - 1
        if terms.left is not None and terms.left >= before:
            terms = dataclasses.replace(terms, left=None)
        if terms.right is not None and terms.right >= after:
            terms = dataclasses.replace(terms, right=None)
        if terms.left is None and terms.right is None and not terms.alibi:
            terms = dataclasses.replace(terms, bottom_right=False)
        return terms

    def _cudnns_alibi(self, own_slopes: bool) -> bool:
        """Whether cuDNN's mask has it: that knows the paper's slopes, and no key to the right."""
        plain = self.alibi and own_slopes and not self.softcap and self.score_mod is None
        return plain and self.right == 0 and not self.bottom_right

    def applied(self, spec: AttentionSpec, *, slopes: bool) -> AttentionSpec:
        """``spec`` on these terms.

        Args:
            spec: the call.
            slopes: the slopes of ALiBi are an operand, not the paper's.
        """
        own = self._cudnns_alibi(not slopes)
        return dataclasses.replace(
            spec,
            causal=self.right == 0,
            left=self.left,
            right=self.right or None,
            bottom_right=self.bottom_right,
            softcap=self.softcap,
            score_mod=self.score_mod,
            alibi=own,
            slopes=self.alibi and not own,
        )


def make_terms(
    is_causal: bool,
    causal_alignment: str,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi: bool,
    score_mod: Expression | None = None,
) -> Terms:
    """The terms that a caller's arguments mean.

    Raises:
        ValueError, TypeError: an argument means nothing; the message names it.
    """
    if causal_alignment not in ALIGNMENTS:
        raise ValueError(
            f"causal_alignment must be one of {', '.join(ALIGNMENTS)}, got {causal_alignment!r}"
        )
    if not isinstance(alibi, bool):
        raise TypeError(f"alibi must be True or False, got {alibi!r}")
    left, right = _bounds(window)
    if is_causal:
        right = 0
    if softcap is not None:
        if isinstance(softcap, bool) or not isinstance(softcap, int | float):
            raise TypeError(f"softcap must be a number or None, got {softcap!r}")
        if softcap and not 1 / LARGEST <= softcap <= LARGEST:
            raise ValueError(
                "softcap must be positive, or None or 0 for none, and like its reciprocal finite "
                f"in float32, got {softcap}"
            )
    return Terms(
        left,
        right,
        causal_alignment == "bottom_right",
        float(softcap or 0),
        alibi,
        score_mod,
    )


def asks_more(
    causal_alignment: str,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi: bool,
    *operands: object,
) -> bool:
    """Whether a call has an argument that PyTorch's function does not have.

    Args:
        causal_alignment, window, softcap, alibi: as for `cudnn_sdpa`.
        operands: lengths, slopes, sinks and so on, each false where the call has none.
    """
    bounded = window is not None and window != (-1, -1)
    capped = softcap is not None and softcap != 0
    return bounded or capped or causal_alignment != "top_left" or alibi or any(operands)


def _bounds(window: tuple[int, int] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    whole = isinstance(window, tuple | list) and len(window) == 2
    if not whole or not all(map(_is_whole_number, window)):
        raise TypeError(
            "window must be (left, right), two whole numbers of keys, -1 for no bound; "
            f"got {window!r}"
        )
    if min(window) < -1:
        raise ValueError(f"window must hold -1 (no bound) or more, got {window}")
    left, right = (None if n == -1 else min(n, FAR) for n in window)
    return left, right


def _is_whole_number(given: object) -> bool:
    # Without torch, which the command line does not load: an extent of a traced shape counts, too.
    plain = isinstance(given, int) and not isinstance(given, bool)
    return plain or type(given).__name__ == "SymInt"


def paper_slopes(heads: int) -> list[float]:
    """Slopes of ALiBi for any number of heads: Press et al., "Train Short, Test Long" (2022).

    A geometric sequence that starts at its own ratio, ``2 ** (-8 / n)`` for n heads. For a number
    that is no power of two: those of the next lower power, and every other one of the next higher.
    """
    lower = 1 << (heads.bit_length() - 1) if heads else 1
    slopes = [2 ** (-8 * (k + 1) / lower) for k in range(lower)]
    return slopes[:heads] + [2 ** (-4 * (2 * k + 1) / lower) for k in range(heads - lower)]
