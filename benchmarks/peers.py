"""Who computes a case, and whether the values are right."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cudnn_mha
from benchmarks import extended
from benchmarks.cases import Case, Direction
from benchmarks.data import Data
from benchmarks.extended import Call
from cudnn_mha import cudnn_sdpa

BACKENDS = {
    "dropin": SDPBackend.CUDNN_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TOLERANCE = 0.02
DROPOUT_TOLERANCE = 0.05


class RefusedError(Exception):
    """A peer that cannot take part."""


def bind(name: str, case: Case, direction: Direction) -> Call:
    """The peer's call with the case's arguments.

    Raises:
        RefusedError: it is not installed, or has no such argument.
    """
    if name == "ours":
        return lambda q, k, v, mask: cudnn_sdpa(
            q, k, v, mask, case.dropout, case.causal, enable_gqa=case.gqa, fallback=False
        )
    if name in BACKENDS:
        return lambda q, k, v, mask: F.scaled_dot_product_attention(
            q, k, v, mask, case.dropout, case.causal, enable_gqa=case.gqa
        )
    module, function = {
        "frontend": ("cudnn", "sdpa_torch"),
        "fa4": ("flash_attn.cute.interface", "flash_attn_func"),
    }[name]
    try:
        operator = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise RefusedError(f"not installed: {error}") from None
    except Exception as error:
        raise RefusedError(f"cannot be imported: {words(error)}") from None
    if case.mask or case.dropout:
        raise RefusedError(f"takes no {'mask' if case.mask else 'dropout'}")
    if name == "frontend":
        lse = direction != "forward"

        def frontend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            result = operator(q, k, v, is_causal=case.causal, return_lse=lse)
            return _first(result)

        return frontend

    def fa4(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return _first(operator(q, k, v, causal=case.causal)).transpose(1, 2)

    return fa4


def _first(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


@contextlib.contextmanager
def only(name: str, direction: Direction) -> Iterator[None]:
    """PyTorch's attention served by that peer's backend alone; gradients as the direction needs."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(direction != "forward"))
        if name in BACKENDS:
            stack.enter_context(sdpa_kernel(BACKENDS[name]))
        if name == "dropin":
            stack.enter_context(cudnn_mha.enabled(prefer=False))
        yield


def prepare(
    name: str, case: Case, direction: Direction, data: Data
) -> tuple[Callable[[], object], float]:
    """What to time of a peer, called once already, and the error of its values.

    Raises:
        RefusedError: it does not serve the case, or its values are wrong.
    """
    call = extended.bind(name, case, data) if case.extended else bind(name, case, direction)
    with warnings.catch_warnings(record=True) as caught, only(name, direction):
        warnings.simplefilter("always")
        try:
            output = call(*data.leaves, data.mask)
        except RuntimeError as error:
            said = [str(w.message).split(" (Triggered")[0] for w in caught]
            said = [s for s in said if "not used because" not in s and "disabled" not in s]
            raise RefusedError("; ".join([words(error), *dict.fromkeys(said)])) from None

        def gradients(grad_output: Tensor = data.grad_output) -> tuple[Tensor, ...]:
            return torch.autograd.grad(output, data.leaves, grad_output, retain_graph=True)

        def step() -> object:
            return torch.autograd.grad(call(*data.leaves, data.mask), data.leaves, data.grad_output)

        got = [output] if direction == "forward" else [output, *gradients()]
        tolerance = TOLERANCE
        if data.real is not None:
            got[0] = got[0].where(data.real, 0)
        expected = data.expected if name != "copy" else data.leaves[1:2]
        distances = [relative_error(*pair) for pair in zip(got, expected, strict=False)]
        if case.dropout:
            tolerance = DROPOUT_TOLERANCE
            distances = _dropout_errors(case, data, output)
            if direction != "forward":
                # The output is linear in the value: <dO, O> = <dV, V>, if the same weights drop.
                grad_value = gradients(output.detach())[2]
                distances.append(_dot(grad_value, data.leaves[2]) / _dot(output, output) - 1)
    distance = max(map(abs, distances))
    if not all(abs(d) <= tolerance for d in distances):  # also where one is NaN
        raise RefusedError(
            f"wrong values: relative errors {', '.join(f'{d:.2g}' for d in distances)}"
        )
    if direction == "forward":
        return (lambda: call(*data.leaves, data.mask)), distance
    return (gradients if direction == "backward" else step), distance


def relative_error(got: Tensor, expected: Tensor) -> float:
    """``‖got - expected‖ / ‖expected‖``."""
    got, expected = got.detach().float(), expected.detach().float()
    return float((got - expected).norm() / expected.norm())


def _dropout_errors(case: Case, data: Data, output: Tensor) -> list[float]:
    """Whether dropout keeps the mean of the output and adds as much noise as it should.

    The values are independent of each other, so the output's power grows by ``1 / (1 - p)``.
    """
    plain = data.expected[0]
    power = _dot(plain, plain)
    grown = _dot(output, output) / power
    return [_dot(output, plain) / power - 1, grown * (1 - case.dropout) - 1]


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.detach().float() * b.detach().float()).sum())


def words(error: BaseException) -> str:
    """An error's kind and message on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, RefusedError) else f"{type(error).__name__}: {text}"
