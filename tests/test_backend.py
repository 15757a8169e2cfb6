"""The drop-in: PyTorch's cuDNN operators as PyTorch has them, served from our plans.

PyTorch has no kernel of its cuDNN operators on the CPU, so ours are put there: then PyTorch's
dispatcher, its shapes for compilers and its autograd formula are all real. What stands in for the
GPU is either one function that computes from the definition (`served`) or, for whatever depends on
layouts, an interpreter that runs the graph of a spec on bare addresses (`gpu`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import math
import random
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

from cudnn_mha import attention, backend, cache, config, devices, dispatch, kernels, reference
from cudnn_mha.attention import draw
from cudnn_mha.backend import BACKWARD, FORWARD
from cudnn_mha.cache import Slot
from cudnn_mha.checks import Kind, Reason
from cudnn_mha.inputs import without_data
from cudnn_mha.kernels import Arguments, Gradients, NotServed
from cudnn_mha.plan import Plan
from cudnn_mha.spec import AttentionSpec, TensorSpec

B, H, SQ, SKV, D = 2, 4, 5, 7, 8

aten: Any = torch.ops.aten


# ------------------------------------------------------------------------------------ stand-ins


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Starts and ends with everything off and nothing counted; sets variables in between."""
    for name in config.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    config.reload()
    backend.disable()
    order = priority()
    monkeypatch.setattr(backend._state, "why", backend._state.why)
    for name in ("forward", "backward", "fallbacks"):
        monkeypatch.setattr(backend._state, name, cache.Counter())
    monkeypatch.setattr(backend._state, "reasons", Counter())
    monkeypatch.setattr(dispatch, "_logged", set())
    torch.manual_seed(0)

    def put(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        config.reload()

    yield put
    backend.disable()
    torch._C._set_sdp_priority_order(order)
    monkeypatch.undo()
    config.reload()


@contextmanager
def registered(key: str, **functions: Callable[..., Any]) -> Iterator[None]:
    """Functions as kernels of PyTorch's operators of these names."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, function in functions.items():
            library.impl(name, function, key, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """PyTorch's cuDNN operators on the CPU are ours."""
    with registered("CPU", **{FORWARD: backend._forward, BACKWARD: backend._backward}):
        yield


class Served(NamedTuple):
    """The arguments of every call that was served."""

    forward: list[Arguments]
    backward: list[Arguments]


@pytest.fixture
def served(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Every call is served, from the definition."""
    calls = Served([], [])

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        arguments: Arguments,
        gradient: bool,
        bias_gradient: bool,
        aten: bool,
        seed: Tensor | None,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        calls.forward.append(arguments)
        output, lse = kernels.reference_forward(query, key, value, bias, arguments, seed)
        return output, lse if gradient else None

    def backward(*given: Any) -> Gradients:
        *call, _bias_gradient, _aten, seed, _offset = given
        calls.backward.append(call[-1])
        return kernels.reference_backward(*call, seed)

    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(kernels, "backward", backward)
    return calls


@pytest.fixture
def refused(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Kind], None]:
    """No call is served, for one reason of that kind."""

    def refuse(kind: Kind) -> None:
        def none(*_: object, **__: object) -> None:
            raise NotServed((Reason("some_rule", "it is so", kind),))

        monkeypatch.setattr(kernels, "forward", none)
        monkeypatch.setattr(kernels, "backward", none)

    return refuse


@pytest.fixture
def gpu(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are decided as for a described GPU, and an interpreter runs what its plans say."""

    def find_plan(spec: AttentionSpec, *_: object) -> tuple[Slot, tuple[Reason, ...]]:
        return Slot(SimpleNamespace(spec=spec)), ()

    decide = functools.partial(dispatch.decide, device=devices.described("h200"))
    monkeypatch.setattr(kernels, "decide", decide)
    monkeypatch.setattr(kernels, "_decisions", dispatch.Decisions())
    monkeypatch.setattr(dispatch, "find_plan", find_plan)
    monkeypatch.setattr(attention, "run", interpret)


def interpret(plan: Plan, addresses: list[int]) -> None:
    """What a plan without dropout does, on the CPU."""
    spec = plan.spec
    places = iter(addresses)
    rows = (*spec.output.shape[:3], 1)
    stats = TensorSpec(rows, (rows[1] * rows[2], rows[2], 1, 1), "float32")

    def operands(*layouts: TensorSpec | None) -> list[Any]:
        return [None if layout is None else at(next(places), layout) for layout in layouts]

    query, key, value, output = operands(spec.query, spec.key, spec.value, spec.output)
    (lse,) = operands(stats if spec.lse or spec.backward else None)
    if spec.backward:
        grad_output, bias, *grads = operands(
            spec.grad_output, spec.bias, spec.grad_query, spec.grad_key, spec.grad_value
        )
        found = reference.gradients(
            grad_output,
            query,
            key,
            value,
            output,
            lse.squeeze(-1),
            bias,
            is_causal=spec.causal,
            scale=spec.scale,
        )
        for grad, result in zip(grads, found, strict=False):
            grad.copy_(result)
    else:
        (bias,) = operands(spec.bias)
        result, sums = reference.attention(
            query, key, value, bias, is_causal=spec.causal, scale=spec.scale
        )
        output.copy_(result)
        if lse is not None:
            lse.copy_(sums.unsqueeze(-1))
    assert next(places, None) is None


def at(address: int, layout: TensorSpec) -> Tensor:
    """The tensor of that layout that lies at an address."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    last = sum((n - 1) * stride for n, stride in zip(layout.shape, layout.stride, strict=True))
    memory = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(layout.shape, layout.stride)


# -------------------------------------------------------------------------------------- helpers


def qkv(
    heads: tuple[int, int, int] = (H, H, H),
    dims: tuple[int, int] = (D, D),
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    shapes = zip(heads, (SQ, SKV, SKV), (dims[0], *dims), strict=True)
    return [torch.randn(B, h, length, dim).to(dtype).requires_grad_() for h, length, dim in shapes]


def exact(
    tensors: list[Tensor], bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, log-sum-exp and gradients for an output gradient of ones, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    output, lse = reference.attention(*leaves, bias, **options)
    grads = torch.autograd.grad(output.sum(), leaves)
    return output.detach(), lse.detach().unsqueeze(-1), list(grads)


def assert_right(
    got: tuple[Any, ...], tensors: list[Tensor], bias: Tensor | None = None, **options: Any
) -> None:
    """Output, log-sum-exp and the gradients that autograd finds are those of the definition."""
    output, lse, grads = exact(tensors, bias, **options)
    close(got[0], output)
    close(got[1], lse)
    for found, want in zip(torch.autograd.grad(got[0].sum(), tensors), grads, strict=True):
        close(found, want)


def close(got: Tensor, want: Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def memory(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """The bytes of each tensor; all of them are dense."""
    return [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]


def disjoint(places: list[tuple[int, int]]) -> bool:
    return all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(places)))


def priority() -> list[int]:
    return [int(number) for number in torch._C._get_sdp_priority_order()]


def dumps() -> list[str]:
    """Every kernel that the dispatcher has for either operator."""
    return [torch._C._dispatch_dump(f"aten::{name}") for name in (FORWARD, BACKWARD)]


def elsewhere(*_: object, **__: object) -> None:
    """Another package's kernel."""
    raise AssertionError("nobody calls this")


# ------------------------------------------------------------------------------- what is returned


@pytest.mark.parametrize("heads", [(H, H, H), (H, 2, 1)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("kind", ["served", "wrong"])
def test_results_are_what_pytorch_tells_compilers(
    request: pytest.FixtureRequest,
    kind: str,
    lse: bool,
    dropout_p: float,
    heads: tuple[int, int, int],
) -> None:
    if kind == "served":
        request.getfixturevalue("served")
    else:
        request.getfixturevalue("refused")(Kind.WRONG)
    tensors = qkv(heads, (16, 8), torch.bfloat16)
    with torch.no_grad():
        got = aten._scaled_dot_product_cudnn_attention(*tensors, None, lse, dropout_p)
    meta = [t.to("meta") for t in tensors]
    want = aten._scaled_dot_product_cudnn_attention(*meta, None, lse, dropout_p)
    assert len(got) == len(want) == 9
    for place, (found, expected) in enumerate(zip(got, want, strict=True)):
        if place == 1 and not lse:  # PyTorch's kernel leaves it out, its meta kernel does not
            assert found is None
        elif isinstance(expected, Tensor):
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype
            assert found.stride() == expected.stride()
            assert found.device == tensors[0].device
        else:
            assert found == expected
    assert got[2] is got[3] is got[8] is None
    assert got[4:6] == (SQ, SKV)
    if lse:
        assert got[1].shape == (B, H, SQ, 1)
        assert got[1].dtype == torch.float32
    for scalar in got[6:8]:
        assert scalar.shape == ()
        assert scalar.dtype == torch.int64


@pytest.mark.parametrize("grad_mode", [False, True])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_no_two_results_that_anybody_reads_share_memory(
    served: Served, dropout_p: float, lse: bool, grad_mode: bool
) -> None:
    tensors = [t.detach() for t in qkv()]
    with torch.set_grad_enabled(grad_mode):
        calls = [
            aten._scaled_dot_product_cudnn_attention(*tensors, None, lse, dropout_p)
            for _ in range(2)
        ]
    # Compiled graphs, which run without grad mode, own the scalars too.
    scalars = (6, 7) if dropout_p or (lse and not grad_mode) else ()
    results = [call[i] for call in calls for i in (0, 1, *scalars) if call[i] is not None]
    assert len(results) == 2 * (1 + lse + len(scalars))
    assert disjoint(memory([*results, *tensors]))
    alive = [weakref.ref(r) for r in results]
    del calls, results
    assert [result for result in alive if result() is not None] == []


def test_what_nobody_reads_is_one_tensor_for_all_calls(served: Served) -> None:
    tensors = [t.detach() for t in qkv()]
    calls = [aten._scaled_dot_product_cudnn_attention(*tensors, None, lse) for lse in (False, True)]
    assert len({scalar.data_ptr() for call in calls for scalar in call[6:8]}) == 1


# --------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("kind", ["served", "wrong"])
@pytest.mark.parametrize(
    ("heads", "dims", "options"),
    [
        ((H, H, H), (D, D), {}),
        ((H, 2, 1), (D, D), {}),
        ((H, 1, 4), (D, 16), {"is_causal": True}),
        ((H, H, H), (D, 24), {"scale": 0.3}),
        ((H, 4, 2), (D, D), {"scale": -0.7, "is_causal": True}),
    ],
)
def test_pytorchs_autograd_formula_gives_the_gradients_of_the_definition(
    request: pytest.FixtureRequest,
    kind: str,
    heads: tuple[int, int, int],
    dims: tuple[int, int],
    options: dict[str, Any],
) -> None:
    if kind == "served":
        request.getfixturevalue("served")
    else:
        request.getfixturevalue("refused")(Kind.WRONG)
    tensors = qkv(heads, dims)
    call = (None, True, 0.0, options.get("is_causal", False))
    got = aten._scaled_dot_product_cudnn_attention(*tensors, *call, scale=options.get("scale"))
    assert_right(got, tensors, **options)
    state = backend.status()
    assert (state.served, state.served_backward) == ((1, 1) if kind == "served" else (0, 0))
    assert state.fallbacks == (0 if kind == "served" else 2)


@pytest.mark.parametrize("shape", [(SQ, SKV), (1, SKV), (B, H, SQ, SKV), (B, 1, 1, SKV)])
@pytest.mark.parametrize("kind", ["served", "wrong"])
def test_a_float_bias_is_added_in_both_directions(
    request: pytest.FixtureRequest, kind: str, shape: tuple[int, ...]
) -> None:
    if kind == "served":
        request.getfixturevalue("served")
    else:
        request.getfixturevalue("refused")(Kind.WRONG)
    tensors, bias = qkv((H, 2, 1)), torch.randn(shape)
    got = aten._scaled_dot_product_cudnn_attention(*tensors, bias, True)
    assert_right(got, tensors, bias.double())


@pytest.mark.parametrize("kind", ["served", "wrong"])
def test_dropout_follows_pytorchs_seed_and_the_backward_its_forward(
    request: pytest.FixtureRequest, kind: str
) -> None:
    if kind == "served":
        request.getfixturevalue("served")
    else:
        request.getfixturevalue("refused")(Kind.WRONG)
    tensors = qkv((H, 2, 1))
    torch.manual_seed(7)
    wanted = [draw(tensors[0].device) for _ in range(2)]
    torch.manual_seed(7)
    calls = [aten._scaled_dot_product_cudnn_attention(*tensors, None, True, 0.5) for _ in range(2)]
    assert [(int(c[6]), int(c[7])) for c in calls] == [(int(s), int(o)) for s, o in wanted]
    assert not torch.equal(calls[0][0], calls[1][0])
    for got in reversed(calls):  # the later forward must not have changed the earlier one's seed
        kept = kernels.kept_weights(*tensors[:2], 0.5, got[6])
        assert kept is not None
        assert 0 < int(kept.sum()) < kept.numel()
        assert_right(got, tensors, dropout_p=0.5, dropout_mask=kept)


def test_the_error_of_a_double_backward_is_pytorchs(served: Served) -> None:
    tensors = qkv()
    output = aten._scaled_dot_product_cudnn_attention(*tensors, None, True)[0]
    (grad,) = torch.autograd.grad(output.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match=rf"derivative for aten::{BACKWARD} is not implemented"):
        torch.autograd.grad(grad.sum(), tensors[0])


@pytest.mark.parametrize("wanted", [False, True])
def test_the_wish_for_determinism_is_passed_on_where_there_is_a_backward(
    served: Served, wanted: bool
) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        tensors = qkv()
        output = aten._scaled_dot_product_cudnn_attention(*tensors, None, True, scale=0.5)[0]
        output.sum().backward()
        with torch.no_grad():
            aten._scaled_dot_product_cudnn_attention(*tensors, None, False, 0.0, True)
    finally:
        torch.use_deterministic_algorithms(before)
    assert served.forward == [Arguments(0.0, False, 0.5, wanted), Arguments(0.0, True)]
    assert served.backward == [Arguments(0.0, False, 0.5, wanted)]


# ---------------------------------------------------------------------------------------- layouts


def laid_out(draws: random.Random, shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    """A tensor with its dimensions in any order in memory, here and there with gaps."""
    order = draws.sample(range(4), 4)
    if draws.random() < 0.7:  # most have the head dimension innermost, as cuDNN wants it
        order.remove(3)
        order.append(3)
    room = [shape[dim] + draws.choice((0, 0, 0, 8)) for dim in order]
    whole = torch.randn(room, dtype=torch.float16, device=device)
    for place, dim in enumerate(order):
        whole = whole.narrow(place, 0, shape[dim])
        if dim != 3 and draws.random() < 0.05:  # repeated in memory
            whole = whole.narrow(place, 0, 1).expand([shape[d] if d == dim else -1 for d in order])
    return whole.permute([order.index(dim) for dim in range(4)])


def drawn(draws: random.Random, device: str = "cpu") -> list[Tensor]:
    """Query, key and value of drawn shapes, extents of 1 among them, in drawn layouts."""
    batch, groups = draws.choice((1, 2)), draws.choice((1, 3))
    heads, dim, dim_v = draws.choice((1, 2)), draws.choice((1, 8, 12, 16)), draws.choice((8, 16))
    seq_q, seq_kv = draws.choice(((1, 6), (5, 1), (5, 6)))  # cuDNN has no backward for (1, 1)
    return [
        laid_out(draws, (batch, heads * groups, seq_q, dim), device),
        laid_out(draws, (batch, heads, seq_kv, dim), device),
        laid_out(draws, (batch, heads, seq_kv, dim_v), device),
    ]


def steps(tensor: Tensor) -> list[int]:
    """The strides that mean something: not those of an extent of 1."""
    return [stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def assert_laid_out(got: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Results are laid out as PyTorch tells compilers, gradients as what they belong to."""
    meta = [without_data(t) for t in tensors]
    want = aten._scaled_dot_product_cudnn_attention(*meta, None, True)
    if want[0].stride(-1) == 1 or want[0].shape == tensors[0].shape:
        assert steps(got[0]) == steps(want[0])
    else:  # PyTorch's cuDNN is never chosen for a query like that, so nothing follows its layout
        assert tensors[0].stride(-1) != 1 or 0 in tensors[0].stride()
        assert got[0].stride(-1) == 1
    assert got[1].stride() == want[1].stride()
    grads = torch.autograd.grad(got[0].sum(), tensors, retain_graph=True)
    assert [g.stride() for g in grads] == [torch.empty_like(t).stride() for t in tensors]


@pytest.mark.parametrize("seed", range(40))
def test_results_and_gradients_have_pytorchs_layouts_and_right_values(gpu: None, seed: int) -> None:
    draws = random.Random(seed)
    for _ in range(5):
        tensors = [t.requires_grad_() for t in drawn(draws)]
        causal = draws.random() < 0.5
        got = aten._scaled_dot_product_cudnn_attention(*tensors, None, True, 0.0, causal)
        assert_laid_out(got, tensors)
        assert_right(got, tensors, is_causal=causal)
    state = backend.status()
    assert (state.served, state.served_backward, state.fallbacks) == (5, 10, 0)


@pytest.mark.parametrize("seed", range(20))
def test_plain_pytorch_has_pytorchs_layouts_too(refused: Callable[[Kind], None], seed: int) -> None:
    refused(Kind.WRONG)
    tensors = [t.requires_grad_() for t in drawn(random.Random(seed))]
    got = aten._scaled_dot_product_cudnn_attention(*tensors, None, True)
    assert_laid_out(got, tensors)
    assert_right(got, tensors)


def test_the_layout_of_a_repeated_query_is_ours_where_pytorchs_would_not_be_rows(
    gpu: None,
) -> None:
    # PyTorch orders the dimensions by stride alone and would put a repeated one innermost.
    query = torch.randn(B, 1, SQ, 16, dtype=torch.float16).expand(B, H, SQ, 16)
    key, value = (torch.randn(B, H, SKV, dim, dtype=torch.float16) for dim in (16, 8))
    meta = [without_data(t) for t in (query, key, value)]
    theirs = aten._scaled_dot_product_cudnn_attention(*meta, None, False)[0]
    assert theirs.stride(-1) != 1
    got = aten._scaled_dot_product_cudnn_attention(query, key, value, None, False)[0]
    assert got.shape == theirs.shape
    assert got.is_contiguous()
    close(got, reference.attention(query.double(), key.double(), value.double())[0])


# ------------------------------------------------------------------------------------- on and off


def test_enabling_and_disabling_twice_is_doing_it_once() -> None:
    kernels_before, order = dumps(), priority()
    assert not backend.status().enabled
    backend.enable()
    once = dumps(), priority()
    backend.enable()
    assert (dumps(), priority()) == once
    state = backend.status()
    assert (state.enabled, state.why, state.provider) == (True, "enable() was called", "cudnn_mha")
    assert state.priority[0] == "CUDNN_ATTENTION"
    assert priority() == [3, *(n for n in order if n != 3)]
    backend.disable()
    backend.disable()
    assert dumps() == kernels_before
    assert priority() == order
    state = backend.status()
    assert (state.enabled, state.why) == (False, "disable() was called")
    assert state.provider == "PyTorch"


def test_both_operators_are_ours_while_enabled() -> None:
    with backend.enabled():
        for dump in dumps():
            (ours,) = (line for line in dump.splitlines() if line.startswith("CUDA: "))
            (theirs,) = (line for line in dump.splitlines() if line.startswith("CUDA (inactive): "))
            assert backend.__file__ in ours
            assert "/RegisterCUDA" in theirs


def test_a_block_restores_what_it_found_also_from_within_another() -> None:
    kernels_before, order = dumps(), priority()
    with backend.enabled():
        ours = dumps(), priority()
        with backend.enabled(prefer=False):
            assert (dumps(), priority()) == ours
        assert (dumps(), priority()) == ours
        assert backend.status().enabled
    assert (dumps(), priority()) == (kernels_before, order)


def test_a_block_restores_what_it_found_after_an_exception() -> None:
    before = dumps(), priority()
    with pytest.raises(KeyError, match="mine"), backend.enabled():
        raise KeyError("mine")
    assert (dumps(), priority()) == before
    assert not backend.status().enabled


def test_a_block_leaves_on_what_was_on() -> None:
    backend.enable()
    with backend.enabled():
        pass
    assert backend.status().enabled
    assert backend.status().provider == "cudnn_mha"


def test_without_prefer_the_order_of_the_backends_stays() -> None:
    order = priority()
    with backend.enabled(prefer=False):
        assert priority() == order
        assert backend.status().provider == "cudnn_mha"
        changed = [*order[1:], order[0]]
        torch._C._set_sdp_priority_order(changed)
    assert priority() == changed


def test_an_order_that_the_user_set_meanwhile_is_left_alone() -> None:
    order = priority()
    with backend.enabled():
        changed = order[::-1]
        torch._C._set_sdp_priority_order(changed)
    assert priority() == changed


def test_sdpa_kernel_around_and_within_restores_what_it_found() -> None:
    order = priority()
    cudnn, math = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
    with backend.enabled():
        ours = priority()
        assert ours[0] == cudnn.value
        with sdpa_kernel([math, cudnn], set_priority=True):
            assert priority()[:2] == [math.value, cudnn.value]
        assert priority() == ours
        with sdpa_kernel(math):  # cuDNN out, and ours with it: PyTorch's choice is not ours
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert priority() == order
    with sdpa_kernel([math, cudnn], set_priority=True):
        around = priority()
        with backend.enabled():
            assert priority() == [cudnn.value, *(n for n in around if n != cudnn.value)]
        assert priority() == around
    assert priority() == order


def test_disabled_wins(clean: Callable[[str, str], None], caplog: pytest.LogCaptureFixture) -> None:
    before = dumps(), priority()
    clean(config.DISABLED, "1")
    clean(config.ENABLED, "1")
    backend.enable()
    with backend.enabled():
        assert (dumps(), priority()) == before
    assert not backend.status().enabled
    assert backend.status().why.startswith(f"{config.DISABLED}=1 is set")
    assert config.DISABLED in caplog.text


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True)])
def test_the_environment_switches_on(
    clean: Callable[[str, str], None], value: str, enabled: bool
) -> None:
    clean(config.ENABLED, value)
    backend.enable_from_environment()
    state = backend.status()
    assert state.enabled is enabled
    assert (state.why == f"{config.ENABLED} is set") is enabled
    assert (state.priority[0] == "CUDNN_ATTENTION") is enabled


def test_what_both_variables_ask_for_is_not_worth_a_word_at_every_start(
    clean: Callable[[str, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    clean(config.ENABLED, "1")
    clean(config.DISABLED, "1")
    backend.enable_from_environment()
    assert backend.status().why.startswith(f"{config.DISABLED}=1 is set")
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_operators_of_another_shape_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = dumps(), priority()
    monkeypatch.setitem(backend.SCHEMAS, name, "(Tensor query) -> Tensor")
    with pytest.raises(RuntimeError) as caught:
        backend.enable()
    text = str(caught.value)
    assert f"aten::{name} of torch {torch.__version__}" in text
    assert "(Tensor query) -> Tensor" in text
    assert str(getattr(aten, name).default._schema).removeprefix(f"aten::{name}") in text
    assert (dumps(), priority()) == before
    assert not backend.status().enabled


def test_a_package_that_came_first_is_named_and_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with registered("CUDA", **{FORWARD: elsewhere, BACKWARD: elsewhere}):
        before = dumps()
        assert __file__ in backend.status().provider
        backend.enable()
        assert f"registered at {__file__}" in caplog.text
        assert backend.status().provider == "cudnn_mha"
        backend.disable()
        assert dumps() == before
        assert __file__ in backend.status().provider
    assert backend.status().provider == "PyTorch"


def test_a_package_that_came_later_is_named(caplog: pytest.LogCaptureFixture) -> None:
    backend.enable()
    with registered("CUDA", **{FORWARD: elsewhere}):
        state = backend.status()
        assert state.enabled
        assert __file__ in state.provider
        assert __file__ in str(state)
        backend.disable()
        assert __file__ in backend.status().provider
    assert backend.status().provider == "PyTorch"
    assert caplog.text == ""


# ------------------------------------------------------------------------------ what is given back


class Pytorchs:
    """Stands in for PyTorch's implementation and keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.results = [torch.randn(B, H, SQ, D), torch.randn(B, H, SQ, 1)]
        self.seeds = [torch.tensor(11), torch.tensor(12)]
        self.grads = [torch.randn(B, H, n, D) for n in (SQ, SKV, SKV)]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> tuple[Any, ...]:
        self.calls.append({k: v for k, v in locals().items() if k != "self"})
        return (*self.results, None, None, max_q, max_k, *self.seeds, None)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        attn_bias: Tensor | None,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        self.calls.append({k: v for k, v in locals().items() if k != "self"})
        return tuple(self.grads)


@pytest.fixture
def pytorchs() -> Iterator[Pytorchs]:
    stand_in = Pytorchs()
    with registered(
        "CPU",
        _cudnn_attention_forward=stand_in.forward,
        _cudnn_attention_backward=stand_in.backward,
    ):
        yield stand_in


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """The same tensors in memory, and equal numbers."""
    assert list(got) == list(want)
    for name, value in want.items():
        if isinstance(value, Tensor):
            assert got[name].data_ptr() == value.data_ptr(), name
            assert got[name].stride() == value.stride(), name
        else:
            assert got[name] == value, name


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [Kind.UNSUPPORTED, Kind.POLICY, Kind.UNAVAILABLE])
def test_a_call_that_is_not_served_is_pytorchs_word_for_word(
    refused: Callable[[Kind], None], pytorchs: Pytorchs, kind: Kind, biased: bool
) -> None:
    refused(kind)
    query, key, value = tensors = qkv()
    bias = torch.randn(B, H, SQ, SKV) if biased else None
    call = (*tensors, bias, True, 0.25, not biased, True)
    got = aten._scaled_dot_product_cudnn_attention(*call, scale=0.3)
    assert_same(
        pytorchs.calls[0],
        {
            "query": query,
            "key": key,
            "value": value,
            "attn_bias": bias,
            "cum_seq_q": None,
            "cum_seq_k": None,
            "max_q": SQ,
            "max_k": SKV,
            "compute_log_sumexp": True,
            "dropout_p": 0.25,
            "is_causal": not biased,
            "return_debug_mask": True,
            "scale": 0.3,
            "seqused_k": None,
            "block_table": None,
        },
    )
    output, lse = pytorchs.results
    seed, offset = pytorchs.seeds
    assert torch.equal(got[0], output)
    assert torch.equal(got[1], lse)
    assert got[2:6] == (None, None, SQ, SKV)
    assert [int(scalar) for scalar in got[6:8]] == [11, 12]

    grad_out = torch.randn_like(output)
    grads = torch.autograd.grad(got[0], tensors, grad_out)
    assert_same(
        pytorchs.calls[1],
        {
            "grad_out": grad_out,
            "query": query,
            "key": key,
            "value": value,
            "out": output,
            "logsumexp": lse,
            "philox_seed": seed,
            "philox_offset": offset,
            "attn_bias": bias,
            "cum_seq_q": None,
            "cum_seq_k": None,
            "max_q": SQ,
            "max_k": SKV,
            "dropout_p": 0.25,
            "is_causal": not biased,
            "scale": 0.3,
        },
    )
    assert all(map(torch.equal, grads, pytorchs.grads))
    assert len(pytorchs.calls) == 2
    state = backend.status()
    assert (state.served, state.served_backward, state.fallbacks) == (0, 0, 2)


@pytest.mark.parametrize("kind", list(Kind))
def test_calls_given_back_are_counted_by_rule_and_explained_once(
    refused: Callable[[Kind], None],
    pytorchs: Pytorchs,
    caplog: pytest.LogCaptureFixture,
    kind: Kind,
) -> None:
    refused(kind)
    for _ in range(3):
        aten._scaled_dot_product_cudnn_attention(*qkv(), None, True)[0].sum().backward()
    assert bool(pytorchs.calls) is (kind is not Kind.WRONG)
    state = backend.status()
    assert state.fallbacks == 6
    assert state.reasons == {"some_rule": 6}
    assert "    some_rule: 6" in str(state).splitlines()
    (record,) = caplog.records
    assert record.name == "cudnn_mha"
    assert "it is so [some_rule]" in record.getMessage()
    assert f"query=({B}, {H}, {SQ}, {D}):torch.float32" in record.getMessage()


@pytest.mark.parametrize(("dtype", "masked"), [(torch.float16, -65504), (torch.bfloat16, -65536)])
def test_rows_of_a_boolean_mask_that_mask_everything_give_zeros(
    served: Served, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, masked: int
) -> None:
    """Where PyTorch writes a finite number for False."""
    monkeypatch.setitem(backend._MASKED, dtype, float(masked))
    tensors = [t.detach().to(dtype) for t in qkv()]
    bias = torch.zeros(B, 1, SQ, SKV, dtype=dtype)
    bias[0, 0, 1] = masked
    bias[1, 0, 2, :3] = masked
    output, lse, *_ = aten._scaled_dot_product_cudnn_attention(*tensors, bias, True)
    want = bias.masked_fill(bias == masked, -math.inf)
    close(output, exact(tensors, want)[0])
    assert (output[0, :, 1] == 0).all() and (lse[0, :, 1] == -math.inf).all()
    # A row of a float mask that is low throughout is none of these.
    lower = bias.masked_fill(bias == masked, -6e4)
    output, *_ = aten._scaled_dot_product_cudnn_attention(*tensors, lower, True)
    assert (output[0, :, 1] != 0).any()


def test_one_wrong_among_the_reasons_keeps_pytorchs_cudnn_out(
    on_cpu: None, pytorchs: Pytorchs, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = (Reason("a", "one"), Reason("b", "two", Kind.WRONG))

    def none(*_: object, **__: object) -> None:
        raise NotServed(reasons)

    monkeypatch.setattr(kernels, "forward", none)
    tensors = qkv()
    got = aten._scaled_dot_product_cudnn_attention(*tensors, None, False)
    assert pytorchs.calls == []
    close(got[0].detach(), exact(tensors)[0])
    assert got[1] is None
    assert backend.status().reasons == {"a": 1, "b": 1}


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_nothing_is_lost_when_many_threads_count(served: Served) -> None:
    threads, calls = 8, 200
    start = threading.Barrier(threads)
    query, key, value = (t.detach() for t in qkv())

    def work() -> None:
        start.wait()
        for number in range(calls):
            leaf = query.clone().requires_grad_(number % 2 == 0)
            output = aten._scaled_dot_product_cudnn_attention(leaf, key, value, None, True)[0]
            if leaf.requires_grad:
                output.sum().backward()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    state = backend.status()
    assert (state.served, state.served_backward) == (threads * calls, threads * calls // 2)
    assert state.fallbacks == 0
