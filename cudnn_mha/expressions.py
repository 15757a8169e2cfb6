"""What becomes of attention scores, as expressions that graphs are made of.

An expression is ``"score"``, ``"q_index"`` or ``"kv_index"``, a number, or a tuple of the name of
an operation and its operands. Names are those of cuDNN's pointwise operations. A number stands
last: where the order matters, cuDNN takes it nowhere else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Expression = str | float | tuple[Any, ...]

LEAVES = ("score", "q_index", "kv_index")

LARGEST = (2 - 2.0**-23) * 2.0**127
"""The largest number of float32."""

LOWEST = -1e9
"""Below all scores; its square is a number too."""

OPERANDS = {
    "add": 2,
    "sub": 2,
    "mul": 2,
    "div": 2,
    "max": 2,
    "min": 2,
    "neg": 1,
    "reciprocal": 1,
    "abs": 1,
    "exp": 1,
    "log": 1,
    "sqrt": 1,
    "tanh": 1,
    "sigmoid": 1,
}
"""How many operands each operation has."""


def capped(expression: Expression, softcap: float) -> Expression:
    """``softcap * tanh(expression / softcap)``."""
    return ("mul", ("tanh", ("mul", expression, 1 / softcap)), softcap)


def within(expression: Expression, lengths: Mapping[str, int]) -> Expression:
    """The expression with the last index of these lengths in place of every one beyond."""
    if isinstance(expression, tuple):
        return (expression[0], *(within(operand, lengths) for operand in expression[1:]))
    if isinstance(expression, str) and expression in lengths:
        return ("min", expression, lengths[expression] - 1.0)
    return expression


def far_below(expression: Expression, lengths: Mapping[str, int]) -> Expression:
    """The expression, but the less the further an index lies beyond these lengths."""
    for index, length in lengths.items():
        inside = ("mul", ("add", ("neg", index), length - 0.5), 1e30)
        expression = ("min", expression, inside)
    return expression


def bounded(expression: Expression) -> Expression:
    """The expression with a finite number in place of a score of minus infinity."""
    if isinstance(expression, tuple):
        return (expression[0], *map(bounded, expression[1:]))
    return ("max", "score", LOWEST) if expression == "score" else expression


def first_hand(expression: Expression) -> Expression:
    """The expression with a copy of the scores, or of their gradient, where these stand second."""
    if not isinstance(expression, tuple):
        return expression
    name, *operands = map(first_hand, expression)
    if len(operands) == 2 and operands[1] in ("score", "gradient"):
        operands[1] = ("mul", operands[1], 1.0)
    return (name, *operands)


def reads(expression: Expression | None, leaf: str) -> bool:
    """Whether the score or an index is in an expression."""
    if isinstance(expression, tuple):
        return any(reads(operand, leaf) for operand in expression[1:])
    return expression == leaf


def numbers(expression: Expression) -> Iterator[float]:
    """The numbers in an expression, as often as they stand there."""
    if isinstance(expression, float):
        yield expression
    elif isinstance(expression, tuple):
        for operand in expression[1:]:
            yield from numbers(operand)


def operations(expression: Expression) -> Iterator[str]:
    """The operations in an expression, as often as they stand there."""
    if isinstance(expression, tuple):
        yield expression[0]
        for operand in expression[1:]:
            yield from operations(operand)


def text(expression: Expression) -> str:
    """The expression in words, such as ``mul(tanh(score), 20)``."""
    if isinstance(expression, tuple):
        return f"{expression[0]}({', '.join(map(text, expression[1:]))})"
    return f"{expression:g}" if isinstance(expression, float) else expression


def to_lists(expression: Expression) -> Any:
    """The expression in lists, for JSON."""
    if isinstance(expression, tuple):
        return [expression[0], *map(to_lists, expression[1:])]
    return expression


def from_lists(data: Any) -> Expression:
    """The expression that `to_lists` made this of.

    Raises:
        ValueError: it is none.
    """
    if isinstance(data, list) and data and isinstance(data[0], str):
        name, *operands = data
        if len(operands) == OPERANDS.get(name):
            return (name, *map(from_lists, operands))
    elif isinstance(data, int | float) and not isinstance(data, bool) and abs(data) <= LARGEST:
        return float(data)
    elif isinstance(data, str) and data in LEAVES:
        return data
    raise ValueError(f"this is no expression of the score: {data!r}")


_TINY = 2.0**-120
"""Less than what any difference of scores is, and far from what float32 rounds to 0."""


def single(number: float) -> float:
    """The number in float32."""
    try:
        found: float = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.inf
    return found


# ------------------------------------------------------------------------------------- derivative


class _Change(NamedTuple):
    """By how much a value changes with the score, times the gradient that arrives: a product.

    Numbers are kept apart, so that those of a soft cap, which cancel, cost no operation.
    """

    factor: float
    of: Expression

    def written(self) -> Expression:
        return self.of if single(self.factor) == 1 else ("mul", self.of, self.factor)

    def scaled(self, factor: float) -> _Change:
        return self._replace(factor=self.factor * factor)

    def times(self, other: Expression) -> _Change:
        return self._replace(of=("mul", self.of, other))

    def over(self, other: Expression) -> _Change:
        return self._replace(of=("div", self.of, other))

    def less(self, other: _Change) -> _Change:
        return _sum(self, other.scaled(-1)) or self


def derivative(expression: Expression) -> Expression:
    """The gradient of the score where ``"gradient"`` is that of ``expression``; 0.0 for none.

    It is made of the same operations: before sm_90, cuDNN has no derivatives of its own for them.
    Where the operands of a maximum or minimum are equal, each gets half of it.
    """
    change = _change(expression)
    return 0.0 if change is None else change.written()


def _change(x: Expression) -> _Change | None:
    """The chain rule; None for what does not depend on the score."""
    if x == "score":
        return _Change(1.0, "gradient")
    if not isinstance(x, tuple):
        return None
    name, *operands = x
    a, da = operands[0], _change(operands[0])
    if len(operands) == 2:
        b = operands[1]
        return _of_two(name, x, a, b, da, _change(b))
    return None if da is None else _of_one(name, x, a, da)


def _of_one(name: str, x: Expression, a: Expression, da: _Change) -> _Change | None:
    if name == "neg":
        return da.scaled(-1)
    if name == "reciprocal":
        return da.times(x).times(x).scaled(-1)
    if name == "exp":
        return da.times(x)
    if name == "log":
        return da.over(a)
    if name == "sqrt":
        return da.over(x).scaled(0.5)
    if name == "abs":
        return da.times(_sign(a))
    part = da.times(x)  # of tanh 1 - x^2, of sigmoid x - x^2
    return (da if name == "tanh" else part).less(part.times(x))


def _of_two(
    name: str,
    x: Expression,
    a: Expression,
    b: Expression,
    da: _Change | None,
    db: _Change | None,
) -> _Change | None:
    if name == "add":
        return _sum(da, db)
    if name == "sub":
        return _sum(da, db and db.scaled(-1))
    if name == "mul" and isinstance(b, float):
        return da and da.scaled(b)
    if name == "mul":
        return _sum(da and da.times(b), db and db.times(a))
    if name == "div":
        return _sum(da and da.over(b), db and db.times(x).over(b).scaled(-1))
    sign = _sign(("add", a, -b) if isinstance(b, float) else ("sub", a, b))
    more = 0.5 if name == "max" else -0.5
    even = _sum(da and da.scaled(0.5), db and db.scaled(0.5))
    return _sum(even, _sum(da and da.times(sign).scaled(more), db and db.times(sign).scaled(-more)))


def _sum(a: _Change | None, b: _Change | None) -> _Change | None:
    if a is None or b is None:
        return a or b
    if a.factor == b.factor:
        return _Change(a.factor, ("add", a.of, b.of))
    if a.factor == -b.factor:
        return _Change(a.factor, ("sub", a.of, b.of))
    return _Change(1.0, ("add", a.written(), b.written()))


def _sign(x: Expression) -> Expression:
    """1, 0 or -1."""
    return ("div", x, ("max", ("abs", x), _TINY))
