"""Functions on the attention scores, traced into expressions.

An expression has no more to do with the function that it was traced from: two functions that
compute the same in the same way give equal expressions.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from cudnn_mha.expressions import (
    LARGEST,
    LEAVES,
    Expression,
    derivative,
    numbers,
    operations,
    text,
)

ScoreMod = Callable[[Any, Any, Any], Any]

MAX_OPERATIONS = 32
"""Most operations of one function."""

MAX_IN_DERIVATIVE = 2048
"""Most of its derivative, counted as often as they are used: every nested one doubles them."""

_ON_TENSORS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": lambda a, b: a.clamp(min=b),
    "min": lambda a, b: a.clamp(max=b),
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}

ALLOWED = (
    "+ - * / with numbers and with each other, abs, and torch.tanh, sigmoid, exp, log, sqrt, abs, "
    "maximum, minimum and clamp"
)


# ------------------------------------------------------------------------------------------ trace


def trace(score_mod: ScoreMod | None) -> Expression | None:
    """The expression of a function; None where there is none, or it gives the score back.

    Args:
        score_mod: called once, with symbols for score, query index and key index.

    Raises:
        TypeError: it is no function, or does what no expression says; names that.
        ValueError: what it gives is no function of the score that has a derivative.
    """
    if score_mod is None:
        return None
    if not callable(score_mod):
        raise TypeError(
            f"score_mod must be a function of (score, q_index, kv_index) or None, got {score_mod!r}"
        )
    _require_arguments(score_mod)
    try:
        result = score_mod(*(Symbol(leaf, 0) for leaf in LEAVES))
    except TypeError as error:
        # PyTorch asks no argument of these what to do before all are tensors.
        if not str(error).startswith(("maximum():", "minimum():")):
            raise
        raise TypeError(
            "score_mod must give torch.maximum and torch.minimum no numbers; "
            "torch.clamp(x, min=number) is the maximum, torch.clamp(x, max=number) the minimum"
        ) from error
    if not isinstance(result, Symbol):
        raise TypeError(
            f"score_mod must return the new score, made of its arguments, got {result!r}"
        )
    expression = result._expression
    if expression == "score":
        return None
    _require_derivative(expression)
    return expression


def _require_arguments(score_mod: ScoreMod) -> None:
    """Raises TypeError for a function that does not take the three, as FlexAttention's do not."""
    try:
        signature = inspect.signature(score_mod)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(*LEAVES)
    except TypeError:
        raise TypeError(
            f"score_mod must take ({', '.join(LEAVES)}), got a function of {signature}; batch and "
            "head are not available: what depends on them goes into attn_mask, alibi_slopes or "
            "sinks"
        ) from None


@functools.lru_cache(maxsize=256)
def _require_derivative(expression: Expression) -> None:
    change = derivative(expression)
    if change == 0.0:
        raise ValueError(
            f"score_mod must depend on the score, got {text(expression)}; put what does not into "
            "attn_mask"
        )
    if next(itertools.islice(operations(change), MAX_IN_DERIVATIVE, None), None) is not None:
        raise ValueError(
            f"score_mod must have a derivative of at most {MAX_IN_DERIVATIVE} operations, got "
            "more; nest fewer operations"
        )
    large = [number for number in numbers(change) if abs(number) > LARGEST]
    if large:
        raise ValueError(
            f"score_mod must have a derivative of numbers that are finite in float32, got "
            f"{large[0]:g} in that of {text(expression)}; make its factors smaller"
        )
    # Kernels compute tiles of keys, and beyond the last key the score is 0.
    places = torch.tensor([0.0, 1.0, 2.0, 100.0], dtype=torch.float64, device="cpu")
    grid = {"q_index": places[:, None], "kv_index": places, "score": places.new_zeros(4, 4)}
    if not _evaluated(change, grid | {"gradient": places.new_ones(4, 4)}).isfinite().any():
        raise ValueError(
            f"score_mod must have a derivative where the score is 0, got {text(expression)}"
        )


class Symbol:
    """A value for every score, which is written down and not computed."""

    __slots__ = ("_expression", "_operations")
    __array_ufunc__ = None  # numbers of NumPy leave operators to us

    def __init__(self, expression: Expression, operations: int) -> None:
        self._expression = expression
        self._operations = operations

    def __repr__(self) -> str:
        return text(self._expression)

    def __add__(self, other: Any) -> Symbol:
        return _made("add", self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Symbol:
        if isinstance(other, Symbol):
            return _made("sub", self, other)
        return _made("add", self, -_number(other))

    def __rsub__(self, other: Any) -> Symbol:
        return _made("add", -self, other)

    def __mul__(self, other: Any) -> Symbol:
        return _made("mul", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Symbol:
        if isinstance(other, Symbol):
            return _made("div", self, other)
        number = _number(other)
        inverse = 1 / number if number else math.inf
        if abs(inverse) > LARGEST:
            raise ValueError(
                f"score_mod divides {self!r} by {number:g}, whose reciprocal is not finite in "
                "float32"
            )
        return _made("mul", self, inverse)

    def __rtruediv__(self, other: Any) -> Symbol:
        inverse = _made("reciprocal", self)
        return inverse if _number(other) == 1 else _made("mul", inverse, other)

    def __neg__(self) -> Symbol:
        return _made("neg", self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return _made("abs", self)

    def __bool__(self) -> bool:
        _refuse("ask whether a value is true")

    def _compare(self, other: Any) -> NoReturn:
        _refuse("compare values")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compare
    __hash__ = None  # type: ignore[assignment]

    def _convert(self, *_: Any) -> NoReturn:
        _refuse("make a number of a value")

    __int__ = __float__ = __index__ = _convert

    def _other(self, *_: Any) -> NoReturn:
        _refuse("use other operators; a square is score * score")

    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _other
    __matmul__ = __rmatmul__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _other
    __lshift__ = __rshift__ = __invert__ = __iter__ = __getitem__ = __len__ = _other

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        _refuse(f"use .{name} of a value")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Symbol:
        given = kwargs or {}
        for value in (*args, *given.values()):
            _refuse_tensor(value)
        made = _FUNCTIONS.get(func)
        if made is None:
            _refuse(f"call {getattr(func, '__name__', func)} of PyTorch")
        return made(*args, **given)


def _made(operation: str, *operands: Any) -> Symbol:
    """The symbol of an operation on symbols and, last, numbers."""
    count = 1 + sum(o._operations for o in operands if isinstance(o, Symbol))
    if count > MAX_OPERATIONS:
        raise ValueError(f"score_mod must be of at most {MAX_OPERATIONS} operations, got {count}")
    values = (o._expression if isinstance(o, Symbol) else _number(o) for o in operands)
    return Symbol((operation, *values), count)


def _number(value: Any) -> float:
    """A number of an expression."""
    _refuse_tensor(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"score_mod must compute with its arguments and numbers, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not abs(number) <= LARGEST:
        raise ValueError(f"numbers in score_mod must be finite in float32, got {number:g}")
    return number + 0.0  # which makes 0 of -0


def _refuse_tensor(value: Any) -> None:
    if isinstance(value, Tensor):
        raise TypeError(
            "score_mod must not use tensors, for plans hold no values of theirs, got one of shape "
            f"{tuple(value.shape)}; use numbers, or attn_mask, alibi_slopes or sinks"
        )


def _refuse(what: str) -> NoReturn:
    raise TypeError(f"score_mod must not {what}; it may use {ALLOWED}")


def _clamp(input: Symbol, min: Any = None, max: Any = None) -> Symbol:
    if min is None and max is None:
        raise ValueError("torch.clamp in score_mod needs min or max, got neither")
    for operation, bound in (("max", min), ("min", max)):
        if bound is not None:
            input = _made(operation, input, bound)
    return input


_FUNCTIONS: dict[Any, Callable[..., Symbol]] = {
    torch.maximum: lambda input, other: _made("max", input, other),
    torch.minimum: lambda input, other: _made("min", input, other),
    torch.clamp: _clamp,
    torch.tanh: lambda input: _made("tanh", input),
    torch.sigmoid: lambda input: _made("sigmoid", input),
    torch.exp: lambda input: _made("exp", input),
    torch.log: lambda input: _made("log", input),
    torch.sqrt: lambda input: _made("sqrt", input),
    torch.abs: lambda input: _made("abs", input),
}


# ---------------------------------------------------------------------------------------- compute


def on_tensors(expression: Expression) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function on tensors that computes an expression."""
    return lambda *given: _evaluated(expression, dict(zip(LEAVES, given, strict=True)))


def _evaluated(expression: Expression, given: dict[str, Tensor]) -> Any:
    if isinstance(expression, str):
        return given[expression]
    if isinstance(expression, float):
        return expression
    name, *operands = expression
    return _ON_TENSORS[name](*(_evaluated(operand, given) for operand in operands))
