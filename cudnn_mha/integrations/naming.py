"""Errors in the words of the function that was called."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def in_words(names: dict[str, str]) -> Callable[[_Function], _Function]:
    """Errors about arguments get the names that the decorated function has for them.

    Args:
        names: by the names that messages have inside.
    """
    pattern = re.compile(rf"\b({'|'.join(names)})\b")

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except (ValueError, TypeError, RuntimeError) as error:
                if len(error.args) == 1 and isinstance(error.args[0], str):
                    text = pattern.sub(lambda found: names[found[0]], error.args[0])
                    error.args = (text,)
                raise

        return cast(_Function, call)

    return decorate
