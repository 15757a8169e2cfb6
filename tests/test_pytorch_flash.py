"""PyTorch's FLASH backend on our plans, through PyTorch's registry.

Its operators have no kernels on the CPU, so stand-ins for PyTorch's are put there, and ours are
activated there: then the registry, the dispatcher, the shapes for compilers, the autograd formulas
and `varlen_attn` are all real. Plans are interpreted.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from cudnn_mha import (
    attention,
    cache,
    config,
    devices,
    dispatch,
    kernels,
    packed,
    padded,
    reference,
    reference_layouts,
)
from cudnn_mha.cache import Slot
from cudnn_mha.integrations import pytorch
from tests import interpreter
from tests.oracle import Call, Results, assert_right
from tests.test_backend import interpret, registered

aten: Any = torch.ops.aten
HALF = torch.float16
NAMES = [name for name, *_ in pytorch._KERNELS if hasattr(aten, name.split("::")[1])]
NAMES += ["torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"]
INPLACE = "_flash_attention_forward_no_dropout_inplace"
LATER = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""This PyTorch's `varlen_attn` knows grouped heads, lengths and pages."""


# -------------------------------------------------------------------------------------- stand-ins


def dense_definition(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """``(B, H, S, D)``; the diagonal ends in the last key."""
    return reference.attention(query, key, value, None, 0.0, is_causal, scale, bottom_right=True)


class Pytorchs:
    """Stand-ins for PyTorch's kernels, and the arguments that they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((name, args, kwargs))

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]

    def sdpa_forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the next operator through the dispatcher, as PyTorch's kernel does."""
        self.note("sdpa_forward", args, kwargs)
        query, key, value, dropout_p, causal, debug = (*args, *(0.0, False, False)[len(args) - 3 :])
        views = (t.transpose(1, 2) for t in (query, key, value))
        sizes = query.shape[2], key.shape[2]
        output, lse, *rest = aten._flash_attention_forward(
            *views, None, None, *sizes, dropout_p, causal, debug, **kwargs
        )
        return output.transpose(1, 2), lse, None, None, *sizes, *rest

    def sdpa_backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        self.note("sdpa_backward", args, kwargs)
        views = (t.transpose(1, 2) for t in args[:5])
        found = aten._flash_attention_backward(*views, *args[5:14], **kwargs)
        return tuple(t.transpose(1, 2) for t in found)

    def flash_forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.note("flash_forward", args, kwargs)
        query, key, value, starts_q, starts_k = args[:5]
        rest = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
        if starts_q is None:
            views = (t.transpose(1, 2) for t in (query, key, value))
            output, lse = dense_definition(*views, args[8], kwargs.get("scale"))
            return output.transpose(1, 2), lse, *rest, query.new_empty(0)
        if starts_k is None or "block_table" in kwargs:
            output, lse = torch.zeros_like(query), query.new_zeros(query.shape[:2]).float().T
        else:
            output, lse = varlen_definition(query, key, value, starts_q, starts_k, args, kwargs)
        return output, lse.contiguous(), *rest, query.new_empty(0)

    def flash_backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        self.note("flash_backward", args, kwargs)
        upstream, *leaves = (t.detach() for t in args[:4])

        def gradients() -> tuple[Tensor, ...]:
            own = [t.requires_grad_() for t in leaves]
            if args[6] is None:
                views = (t.transpose(1, 2) for t in own)
                output = dense_definition(*views, args[11], kwargs.get("scale"))[0].transpose(1, 2)
            else:
                call = (*own, *args[6:12])
                output = varlen_definition(*call[:5], call, kwargs)[0]
            return torch.autograd.grad(output, own, upstream)

        with ThreadPoolExecutor(1) as outside:  # of the dispatcher, which is below autograd here
            return outside.submit(gradients).result()

    def flash_forward_into(self, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.note("flash_forward_into", (out, *args), kwargs)
        output, lse, *_ = self.flash_forward(*args, **kwargs)
        self.calls.pop()
        out.copy_(output)
        return lse  # type: ignore[no-any-return]


def varlen_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    window = (kwargs.get("window_size_left"), kwargs.get("window_size_right"))
    left, right = (-1 if n is None else n for n in window)
    return reference_layouts.varlen(
        query,
        key,
        value,
        starts_q,
        starts_k,
        is_causal=args[8],
        scale=kwargs.get("scale"),
        bottom_right=True,
        window=(left, right),
        seq_lens_kv=kwargs.get("seqused_k"),
    )


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts and ends with nothing active and nothing counted."""
    for name in config.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    config.reload()
    for name in ("forward", "backward", "fallbacks"):
        monkeypatch.setattr(pytorch._tally, name, cache.Counter())
    monkeypatch.setattr(pytorch._tally, "reasons", Counter())
    monkeypatch.setattr(dispatch, "_logged", set())
    torch.manual_seed(0)
    pytorch.register()
    yield
    registry.restore_flash_attention_impl(_raise_warn=False)
    monkeypatch.undo()
    config.reload()


@pytest.fixture
def pytorchs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pytorchs]:
    """PyTorch's kernels are on the CPU, and ours go there too."""
    monkeypatch.setattr(pytorch, "_KEY", "CPU")
    stand_in = Pytorchs()
    functions: dict[str, Callable[..., Any]] = {
        "_scaled_dot_product_flash_attention": stand_in.sdpa_forward,
        "_scaled_dot_product_flash_attention_backward": stand_in.sdpa_backward,
        "_flash_attention_forward": stand_in.flash_forward,
        "_flash_attention_backward": stand_in.flash_backward,
    }
    if hasattr(aten, INPLACE):
        functions[INPLACE] = stand_in.flash_forward_into
    with registered("CPU", **functions):
        yield stand_in
        registry.restore_flash_attention_impl(_raise_warn=False)


@pytest.fixture
def dense_gpu(pytorchs: Pytorchs, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Dense calls are decided as for a described GPU, and interpreted; the specs that ran."""
    ran: list[Any] = []

    def run(plan: Any, addresses: list[int]) -> None:
        ran.append(plan.spec)
        interpret(plan, addresses)

    def find_plan(spec: Any, *_: object) -> tuple[Slot, tuple[()]]:
        plan: Any = SimpleNamespace(spec=spec)
        return Slot(plan), ()

    decide = functools.partial(dispatch.decide, device=devices.described("h200"))
    monkeypatch.setattr(kernels, "decide", decide)
    monkeypatch.setattr(kernels, "_decisions", dispatch.Decisions())
    monkeypatch.setattr(dispatch, "find_plan", find_plan)
    monkeypatch.setattr(attention, "run", run)
    registry.activate_flash_attention_impl("cudnn_mha")
    return ran


@pytest.fixture
def packed_gpu(pytorchs: Pytorchs, monkeypatch: pytest.MonkeyPatch) -> interpreter.Machine:
    """Packed calls are decided as for a GPU, and interpreted."""
    machine = interpreter.install(monkeypatch, packed, padded)
    registry.activate_flash_attention_impl("cudnn_mha")
    return machine


def counted() -> tuple[int, int, int]:
    now = pytorch.status()
    return now.served, now.served_backward, now.fallbacks


def close(got: Tensor, want: Tensor, tolerance: float = 6e-3) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def dumps() -> list[str]:
    """All kernels of all operators."""
    return [torch._C._dispatch_dump(name) for name in NAMES]


# --------------------------------------------------------------------------------------- registry


def test_registering_changes_nothing_and_restoring_restores_exactly() -> None:
    before = dumps()
    pytorch.register()
    assert "cudnn_mha" in registry.list_flash_attention_impls()
    assert dumps() == before
    assert not pytorch.status().active
    for _ in range(2):
        registry.activate_flash_attention_impl("cudnn_mha")
        assert registry.current_flash_attention_impl() == "cudnn_mha"
        assert pytorch.status().active
        ours = dumps()
        assert all(one != other for one, other in zip(ours, before, strict=True))
        assert all(pytorch.__file__ in dump or "CUDA" in dump for dump in ours)
    registry.activate_flash_attention_impl("cudnn_mha")  # again, while active
    registry.restore_flash_attention_impl()
    assert dumps() == before
    assert not pytorch.status().active


def test_kernels_from_before_come_back(dense_gpu: list[Any], pytorchs: Pytorchs) -> None:
    tensors = [torch.randn(1, 2, 8, 16, dtype=HALF) for _ in range(3)]
    ours = aten._scaled_dot_product_flash_attention(*tensors)
    assert pytorchs.calls == []
    registry.restore_flash_attention_impl()
    theirs = aten._scaled_dot_product_flash_attention(*tensors)
    assert pytorchs.names == ["sdpa_forward", "flash_forward"]
    close(ours[0], theirs[0])
    assert counted() == (1, 0, 0)


def test_the_switch_that_wins_over_everything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(config.DISABLED, "1")
    config.reload()
    before = dumps()
    registry.activate_flash_attention_impl("cudnn_mha")
    assert dumps() == before
    assert registry.current_flash_attention_impl() is None
    assert config.DISABLED in caplog.text


def test_another_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dumps()
    name = "aten::_flash_attention_backward"
    monkeypatch.setitem(pytorch.SCHEMAS, name, ("(Tensor grad_out) -> Tensor",))
    with pytest.raises(RuntimeError, match=f"{name} of torch .* is not one that cudnn_mha knows"):
        registry.activate_flash_attention_impl("cudnn_mha")
    assert dumps() == before
    assert registry.current_flash_attention_impl() is None


def test_status_in_words(dense_gpu: list[Any]) -> None:
    tensors = [torch.randn(1, 2, 8, 16, dtype=HALF) for _ in range(3)]
    aten._scaled_dot_product_flash_attention(*tensors)
    aten._scaled_dot_product_flash_attention(*tensors, 0.5)
    assert str(pytorch.status()).splitlines() == [
        "PyTorch's FLASH backend is served by cudnn_mha",
        "  served: 1 forward, 0 backward",
        "  given back: 1",
        "    flash_dropout: 1",
    ]
    registry.restore_flash_attention_impl()
    assert str(pytorch.status()).startswith("PyTorch's FLASH backend is not served by cudnn_mha")


# ------------------------------------------------------------------------------------------ dense


def bhsd(heads: int, length: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
    shape = (2, heads, length, 16)
    back = [order.index(dim) for dim in range(4)]
    return torch.randn(*(shape[dim] for dim in order)).to(HALF).permute(back)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_results_are_what_pytorch_tells_compilers(
    dense_gpu: list[Any], order: tuple[int, ...]
) -> None:
    tensors = [bhsd(n, length, order) for n, length in ((4, 6), (2, 9), (2, 9))]
    swapped = [t.transpose(1, 2) for t in tensors]
    calls = (
        (aten._scaled_dot_product_flash_attention, tensors, ()),
        (aten._flash_attention_forward, swapped, (None, None, 6, 9, 0.0, False, False)),
    )
    for operator, given, rest in calls:
        got = operator(*given, *rest)
        want = operator(*(t.to("meta") for t in given), *rest)
        assert len(got) == len(want)
        for found, expected in zip(got, want, strict=True):
            if isinstance(expected, Tensor):
                assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
                assert found.stride() == expected.stride()
            else:
                assert found == expected
        lse = got[1]
        assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)
    assert counted() == (2, 0, 0)
    assert [(spec.lse, spec.backward) for spec in dense_gpu] == [(True, False)] * 2


@pytest.mark.parametrize("scale", [None, 0.4, -0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_dense_values_and_pytorchs_autograd_formula(
    dense_gpu: list[Any],
    pytorchs: Pytorchs,
    heads: tuple[int, int],
    causal: bool,
    scale: float | None,
) -> None:
    sizes = (7, 7) if causal else (7, 10)
    leaves = [
        bhsd(n, length).requires_grad_()
        for n, length in ((heads[0], sizes[0]), (heads[1], sizes[1]), (heads[1], sizes[1]))
    ]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want, want_lse = dense_definition(*wide, causal, scale)
    upstream = torch.randn(want.shape).to(HALF)
    expected = torch.autograd.grad(want, wide, upstream.double())
    output, lse, *_ = aten._scaled_dot_product_flash_attention(
        *leaves, 0.0, causal, False, scale=scale
    )
    close(output, want)
    close(lse, want_lse)
    for got, grad in zip(torch.autograd.grad(output, leaves, upstream), expected, strict=True):
        close(got, grad)
    assert counted() == (1, 1, 0)
    # The same through the operators below it, whose tensors are (B, S, H, D).
    views = [t.detach().transpose(1, 2) for t in leaves]
    call = (None, None, *sizes, 0.0, causal)
    found = aten._flash_attention_forward(*views, *call, False, scale=scale)
    close(found[0].transpose(1, 2), want)
    given = (upstream.transpose(1, 2), *views, *found[:2])
    grads = aten._flash_attention_backward(*given, *call, *found[2:4], scale=scale)
    for got, grad in zip(grads, expected, strict=True):
        close(got.transpose(1, 2), grad)
    assert counted() == (2, 2, 0)
    assert pytorchs.calls == []


def test_windows_that_say_causal_are_served_and_others_are_pytorchs(
    dense_gpu: list[Any], pytorchs: Pytorchs
) -> None:
    tensors = [bhsd(4, 7).transpose(1, 2) for _ in range(3)]
    call = (*tensors, None, None, 7, 7, 0.0, False, False)
    output = aten._flash_attention_forward(*call, window_size_left=-1, window_size_right=0)[0]
    want = dense_definition(*(t.double().transpose(1, 2) for t in tensors), True, None)[0]
    close(output.transpose(1, 2), want)
    assert counted() == (1, 0, 0)
    aten._flash_attention_forward(*call, window_size_left=2, window_size_right=0)
    assert pytorchs.calls[0][2] == {"window_size_left": 2, "window_size_right": 0}
    assert pytorch.status().reasons == {"dense_window": 1}


def test_one_query_is_causal_without_a_mask(dense_gpu: list[Any]) -> None:
    tensors = [bhsd(4, length) for length in (1, 9, 9)]
    output = aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)[0]
    close(output, dense_definition(*(t.double() for t in tensors), True, None)[0])
    assert [spec.causal for spec in dense_gpu] == [False]


def test_deterministic_gradients_are_asked_for(dense_gpu: list[Any]) -> None:
    leaves = [bhsd(4, 7).requires_grad_() for _ in range(3)]
    torch.use_deterministic_algorithms(True)
    try:
        aten._scaled_dot_product_flash_attention(*leaves)[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [spec.deterministic for spec in dense_gpu if spec.backward] == [True]


# ----------------------------------------------------------------------------------------- packed


LENGTHS_Q, LENGTHS_K = (3, 1, 6), (5, 4, 2)


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def thd(heads: int, lengths: tuple[int, ...], dim: int = 16) -> Tensor:
    return torch.randn(sum(lengths), heads, dim).to(HALF)


WINDOWS = [(-1, -1), (-1, 0), (2, 0), (1, 2)]


@pytest.mark.parametrize("dim", [16, 12])
@pytest.mark.parametrize("scale", [None, -0.3])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("same", [False, True])
def test_varlen_attn(
    packed_gpu: interpreter.Machine,
    pytorchs: Pytorchs,
    same: bool,
    window: tuple[int, int],
    scale: float | None,
    dim: int,
) -> None:
    lengths_k = LENGTHS_Q if same else LENGTHS_K
    kv_heads = 2 if LATER else 4
    more: dict[str, Any] = {"enable_gqa": True} if LATER else {}
    leaves = [
        thd(n, lengths, dim).requires_grad_()
        for n, lengths in ((4, LENGTHS_Q), (kv_heads, lengths_k), (kv_heads, lengths_k))
    ]
    cu_q = starts(LENGTHS_Q)
    cu_k = cu_q if same else starts(lengths_k)
    call = (cu_q, cu_k, max(LENGTHS_Q), max(lengths_k))
    more |= {"scale": scale, "window_size": window}
    output, lse = varlen_attn(*leaves, *call, return_aux=AuxRequest(lse=True), **more)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want, want_lse = reference_layouts.varlen(
        *wide, cu_q, cu_k, scale=scale, bottom_right=True, window=window
    )
    close(output, want)
    close(lse, want_lse)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((4, 10), torch.float32, True)
    upstream = torch.randn(want.shape).to(HALF)
    expected = torch.autograd.grad(want, wide, upstream.double())
    for got, grad in zip(torch.autograd.grad(output, leaves, upstream), expected, strict=True):
        close(got, grad)
    assert counted() == (1, 1, 0)
    assert pytorchs.calls == []
    assert [spec.backward for spec in packed_gpu.runs] == [False, True]
    bounded = window != (-1, -1)
    assert all(spec.bottom_right == (bounded and not same) for spec in packed_gpu.runs)


def test_the_operators_below_varlen_attn(packed_gpu: interpreter.Machine) -> None:
    fused = torch.randn(10, 3, 4, 16).to(HALF)  # views into a projection
    tensors = [fused[:, n].requires_grad_() for n in range(3)]
    cu = starts(LENGTHS_Q)
    call = (cu, cu, 6, 6, 0.0, True)
    found = aten._flash_attention_forward(*tensors, *call, False)
    want = aten._flash_attention_forward(
        *(t.to("meta") for t in tensors), *(cu.to("meta"),) * 2, *call[2:], False
    )
    for got, expected in zip(found, want, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (
            expected.shape,
            expected.dtype,
            expected.stride(),
        )
    upstream = torch.randn_like(found[0])
    grads = aten._flash_attention_backward(
        upstream, *tensors, *found[:2], *call, *found[2:4], window_size_left=None
    )
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact, _ = reference_layouts.varlen(*wide, cu, cu, is_causal=True)
    close(found[0], exact)
    for got, expected, leaf in zip(
        grads, torch.autograd.grad(exact, wide, upstream.double()), tensors, strict=True
    ):
        close(got, expected)
        assert got.stride() == torch.empty_like(leaf).stride()
    assert counted() == (1, 1, 0)


def test_results_have_the_layout_of_the_query(packed_gpu: interpreter.Machine) -> None:
    tensors = [torch.randn(4, 10, 16).to(HALF).transpose(0, 1) for _ in range(3)]
    cu = starts(LENGTHS_Q)
    output: Any = varlen_attn(*tensors, cu, cu, 6, 6)
    assert output.stride() == tensors[0].stride()
    close(output, reference_layouts.varlen(*(t.double() for t in tensors), cu, cu)[0])


def test_where_no_gradient_is_wanted_no_backward_is_asked_for(
    packed_gpu: interpreter.Machine,
) -> None:
    tensors, cu = [thd(4, LENGTHS_Q).requires_grad_() for _ in range(3)], starts(LENGTHS_Q)
    call = (*tensors, cu, cu, 6, 6, 0.0, False, False)
    with torch.no_grad():
        aten._flash_attention_forward(*call)
    # The autograd formula of `varlen_attn` runs its forward as if there were no gradient.
    varlen_attn(*call[:7])
    assert [spec.backward for spec in packed_gpu.specs] == [False]
    aten._flash_attention_forward(*call)
    assert [spec.backward for spec in packed_gpu.specs] == [False, False, True]
    assert counted() == (3, 0, 0)


@pytest.mark.skipif(not LATER, reason="this PyTorch's varlen_attn has no seqused_k")
@pytest.mark.parametrize("same", [False, True])
def test_used_lengths_and_a_given_output(packed_gpu: interpreter.Machine, same: bool) -> None:
    lengths_k = LENGTHS_Q if same else LENGTHS_K
    query, key, value = (thd(4, lengths) for lengths in (LENGTHS_Q, lengths_k, lengths_k))
    cu_q = starts(LENGTHS_Q)
    cu_k = cu_q if same else starts(lengths_k)
    used = torch.tensor([2, 1, 1], dtype=torch.int32)
    call = (query, key, value, cu_q, cu_k, 6, max(lengths_k))
    output = varlen_attn(*call, window_size=(-1, 0), seqused_k=used)
    want, want_lse = reference_layouts.varlen(
        *(t.double() for t in call[:3]),
        cu_q,
        cu_k,
        is_causal=True,
        bottom_right=True,
        seq_lens_kv=used,
    )
    close(output, want)
    out = torch.full_like(query, 7.0)
    lse = getattr(aten, INPLACE)(
        out, *call, 0.0, True, False, window_size_left=-1, window_size_right=0, seqused_k=used
    )
    close(out, want)
    close(lse, want_lse)
    assert counted() == (2, 0, 0)


@pytest.mark.parametrize("window", [(-1, -1), (2, 0)])
def test_compiled_whole(packed_gpu: interpreter.Machine, window: tuple[int, int]) -> None:
    leaves = [thd(4, LENGTHS_Q).requires_grad_() for _ in range(3)]
    cu = starts(LENGTHS_Q)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = varlen_attn(query, key, value, cu, cu, 6, 6, window_size=window)
        assert isinstance(found, Tensor)
        return found

    output = attend(*leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want, _ = reference_layouts.varlen(*wide, cu, cu, window=window)
    close(output, want)
    for got, expected in zip(
        torch.autograd.grad(output.sum(), leaves),
        torch.autograd.grad(want.sum(), wide),
        strict=True,
    ):
        close(got, expected)
    assert counted() == (1, 1, 0)


def test_pytorchs_switch_for_its_own_cudnn_backend_does_not_matter(
    packed_gpu: interpreter.Machine,
) -> None:
    tensors, cu = [thd(4, LENGTHS_Q) for _ in range(3)], starts(LENGTHS_Q)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        varlen_attn(*tensors, cu, cu, 6, 6)
    assert counted() == (1, 0, 0)


# ------------------------------------------------------------------------------------- given back


@pytest.mark.parametrize(
    ("rest", "reasons"),
    [
        ((0.25,), {"flash_dropout": 1}),
        ((0.0, False, True), {"debug_mask": 1}),
        ((0.5, True, True), {"flash_dropout": 1, "debug_mask": 1}),
        ((0.0, True), {"bottom_right": 1}),
    ],
)
def test_a_call_that_is_not_served_is_pytorchs_word_for_word(
    dense_gpu: list[Any],
    pytorchs: Pytorchs,
    caplog: pytest.LogCaptureFixture,
    rest: tuple[Any, ...],
    reasons: dict[str, int],
) -> None:
    leaves = [bhsd(4, length).requires_grad_() for length in (6, 9, 9)]
    output, *_ = aten._scaled_dot_product_flash_attention(*leaves, *rest, scale=0.3)
    # PyTorch's kernel calls another operator that we replace, which is no second call.
    assert pytorchs.names == ["sdpa_forward", "flash_forward"]
    _, args, kwargs = pytorchs.calls[0]
    for given, leaf in zip(args, leaves, strict=False):
        assert given.data_ptr() == leaf.data_ptr()
        assert given.stride() == leaf.stride()
    assert args[3:] == rest
    assert kwargs == {"scale": 0.3}
    assert counted() == (0, 0, 1)
    assert pytorch.status().reasons == reasons
    (record,) = caplog.records
    assert "query=(2, 4, 6, 16)" in record.getMessage()
    output.sum().backward()
    backward = reasons.keys() - {"debug_mask"}
    assert pytorchs.names[2:] == (["sdpa_backward", "flash_backward"] if backward else [])
    assert counted() == ((0, 0, 2) if backward else (0, 1, 1))
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want, _ = dense_definition(*wide, len(rest) > 1 and rest[1], 0.3)
    for leaf, grad in zip(leaves, torch.autograd.grad(want.sum(), wide), strict=True):
        assert leaf.grad is not None
        close(leaf.grad, grad)


def test_what_packed_calls_leave_to_pytorch(
    packed_gpu: interpreter.Machine, pytorchs: Pytorchs
) -> None:
    tensors, cu = [thd(4, LENGTHS_Q) for _ in range(3)], starts(LENGTHS_Q)
    call = (*tensors, cu, cu, 6, 6)
    slopes = torch.rand(4)
    aten._flash_attention_forward(*call, 0.0, True, False, alibi_slopes=slopes)
    assert pytorchs.calls[0][2]["alibi_slopes"].data_ptr() == slopes.data_ptr()
    expected = {"alibi_slopes": 1}
    if LATER:
        varlen_attn(*call, num_splits=1)
        pages = torch.zeros(4, 16, 4, 16, dtype=HALF)
        table, used = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
        pool = (tensors[0], pages, pages, cu, None, 6, 32)
        varlen_attn(*pool, block_table=table, seqused_k=used)
        expected |= {"num_splits": 1, "block_table": 1}
    assert pytorch.status().reasons == expected
    assert pytorchs.names == ["flash_forward"] * len(expected)
    assert counted() == (0, 0, len(expected))


def test_reasons_of_plans_are_reasons_to_give_back(
    packed_gpu: interpreter.Machine, pytorchs: Pytorchs, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves, cu = [thd(4, LENGTHS_Q).requires_grad_() for _ in range(3)], starts(LENGTHS_Q)
    monkeypatch.setattr(packed, "goes_through_padding", lambda *_: True)
    monkeypatch.setattr(devices, "cuda", lambda index: SimpleNamespace(sm=80))
    output: Any = varlen_attn(*leaves, cu, cu, 6, 6)
    output.sum().backward()
    assert pytorch.status().reasons == {"packed_gradient": 2}


def test_want_of_memory_is_one_too(
    dense_gpu: list[Any], pytorchs: Pytorchs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(attention, "run", full)
    tensors = [bhsd(4, 7) for _ in range(3)]
    output = aten._scaled_dot_product_flash_attention(*tensors)[0]
    close(output, dense_definition(*(t.double() for t in tensors), False, None)[0])
    assert pytorch.status().reasons == {"memory": 1}


def test_other_tensors_are_pytorchs(dense_gpu: list[Any], pytorchs: Pytorchs) -> None:
    tensors = [torch.randn(2, 4, 7, 16) for _ in range(3)]
    aten._scaled_dot_product_flash_attention(*tensors)
    assert pytorchs.names == ["sdpa_forward", "flash_forward"]
    assert "dtype" in pytorch.status().reasons


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_either_direction_may_be_served_alone(
    dense_gpu: list[Any], pytorchs: Pytorchs, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def none(*_: object, **__: object) -> None:
        raise kernels.NotServed(())

    monkeypatch.setattr(kernels, kind, none)
    leaves = [bhsd(4, 7).requires_grad_() for _ in range(3)]
    output = aten._scaled_dot_product_flash_attention(*leaves, 0.0, True)[0]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want, _ = dense_definition(*wide, True, None)
    upstream = torch.randn(want.shape).to(HALF)
    expected = torch.autograd.grad(want, wide, upstream.double())
    for got, grad in zip(torch.autograd.grad(output, leaves, upstream), expected, strict=True):
        close(got, grad)
    assert counted() == ((0, 1, 1) if kind == "forward" else (1, 0, 1))


# -------------------------------------------------------------------------------------------- gpu


@pytest.fixture
def activated() -> Iterator[None]:
    registry.activate_flash_attention_impl("cudnn_mha")
    yield
    registry.restore_flash_attention_impl()


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def sdpa(case: Call, *, gradients: bool = True) -> Results:
    """Output and gradients by PyTorch's function; all of it must be ours."""
    leaves = case.leaves()
    before = counted()
    with torch.set_grad_enabled(gradients), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = F.scaled_dot_product_attention(*leaves, **case.options)
    results = {"output": output.detach()}
    if gradients:
        found = torch.autograd.grad(output, leaves, case.grad_output)
        results |= dict(zip(case.names, found, strict=True))
    after = counted()
    done = tuple(b - a for a, b in zip(before, after, strict=True))
    assert done == (1, int(gradients), 0), pytorch.status()
    return results


@pytest.mark.gpu
@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("dim", [64, 128, 40])
def test_gpu_dense(dim: int, heads: tuple[int, int], causal: bool, dtype: torch.dtype) -> None:
    for length_q, length_k in ((256, 256), (77, 77)) if causal else ((256, 300), (1, 200)):
        shapes = ((heads[0], length_q), (heads[1], length_k), (heads[1], length_k))
        tensors = (randn(2, n, length, dim, dtype=dtype) for n, length in shapes)
        options = {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}
        case = Call(*tensors, options=options)
        assert_right(case, results=sdpa)
        assert_right(case, results=sdpa, gradients=False)


@pytest.mark.gpu
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=str)
def test_gpu_results_are_laid_out_as_pytorchs(order: tuple[int, ...]) -> None:
    shape = (2, 4, 136, 64)
    back = [order.index(dim) for dim in range(4)]
    tensors = [
        randn(*(shape[dim] for dim in order), dtype=torch.bfloat16).permute(back) for _ in range(3)
    ]
    cu = torch.tensor([0, 100, 272], device="cuda", dtype=torch.int32)
    flat = [t.transpose(1, 2).flatten(0, 1) for t in tensors]
    upstream = torch.randn_like(tensors[0])

    def run() -> list[Any]:
        dense = aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)
        grads = aten._scaled_dot_product_flash_attention_backward(
            upstream, *tensors, *dense[:2], None, None, 136, 136, 0.0, True, *dense[6:8]
        )
        found = aten._flash_attention_forward(*flat, cu, cu, 172, 172, 0.0, True, False)
        return [*dense, *grads, *found]

    theirs = run()
    registry.activate_flash_attention_impl("cudnn_mha")
    ours = run()
    assert counted() == (2, 1, 0), pytorch.status()
    registry.restore_flash_attention_impl()
    again = run()
    assert counted() == (2, 1, 0)
    for place, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(want, Tensor):
            assert got == want
            continue
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device), place
        assert got.stride() == want.stride(), place
        if want.is_floating_point() and want.numel():
            size = want.double().norm()
            assert (got.double() - want.double()).norm() < 0.01 * size, place
    assert torch.equal(again[0], theirs[0])


def varlen(case: Call, *, gradients: bool = True, compiled: bool = False) -> Results:
    """A padded call of two equally long sequences by `varlen_attn`; all of it must be ours."""
    flat = [t.detach().transpose(1, 2).flatten(0, 1).contiguous() for t in case.leaves()]
    flat = [t.requires_grad_(gradients) for t in flat]
    size_q, size_k = case.query.shape[2], case.key.shape[2]
    cu_q, cu_k = (
        torch.arange(3, device="cuda", dtype=torch.int32) * size for size in (size_q, size_k)
    )
    o = case.options
    window = (-1, 0) if o.get("is_causal") else o.get("window", (-1, -1))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        found: Any = varlen_attn(
            query,
            key,
            value,
            cu_q,
            cu_k,
            size_q,
            size_k,
            window_size=window,
            return_aux=AuxRequest(lse=True),
        )
        return found[0], found[1]

    before = counted()
    function = torch.compile(attend, fullgraph=True) if compiled else attend
    with torch.set_grad_enabled(gradients):
        output, lse = function(*flat)

    def unpacked(t: Tensor, size: int) -> Tensor:
        return t.view(2, size, *t.shape[1:]).transpose(1, 2)

    results = {
        "output": unpacked(output.detach(), size_q),
        "lse": unpacked(lse.detach().mT.contiguous(), size_q),
    }
    if gradients:
        assert case.grad_output is not None
        upstream = case.grad_output.transpose(1, 2).flatten(0, 1)
        found = torch.autograd.grad(output, flat, upstream)
        for name, grad, size in zip(case.names, found, (size_q, size_k, size_k), strict=True):
            results[name] = unpacked(grad, size)
    done = tuple(b - a for a, b in zip(before, counted(), strict=True))
    assert done == (1, int(gradients), 0), pytorch.status()
    return results


@pytest.mark.gpu
@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(256, 256), (100, 333)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (50, 0), (30, 20)], ids=str)
def test_gpu_varlen(window: tuple[int, int], lengths: tuple[int, int], dtype: torch.dtype) -> None:
    for dim in (64, 128):
        shapes = [(4, length) for length in (lengths[0], lengths[1], lengths[1])]
        tensors = (randn(2, n, length, dim, dtype=dtype) for n, length in shapes)
        options: dict[str, Any] = {"causal_alignment": "bottom_right", "window": window}
        if window == (-1, 0):
            options = {"causal_alignment": "bottom_right", "is_causal": True}
        case = Call(*tensors, options=options)
        assert_right(case, results=varlen)
        assert_right(case, results=varlen, gradients=False)


the_compilers_own = pytest.mark.filterwarnings("ignore")


@pytest.mark.gpu
@the_compilers_own
@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("gradients", [False, True])
def test_gpu_varlen_compiled_whole(gradients: bool) -> None:
    tensors = (randn(2, 4, 200, 64, dtype=torch.bfloat16) for _ in range(3))
    options: dict[str, Any] = {"causal_alignment": "bottom_right", "is_causal": True}
    case = Call(*tensors, options=options)
    assert_right(case, results=varlen, gradients=gradients, compiled=True)


@pytest.mark.gpu
@the_compilers_own
@pytest.mark.usefixtures("activated")
def test_gpu_dense_compiled_whole() -> None:
    def compiled(case: Call, *, gradients: bool = True) -> Results:
        leaves = case.leaves()
        before = counted()

        @torch.compile(fullgraph=True)
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, **case.options)

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            output = attend(*leaves)
        found = torch.autograd.grad(output, leaves, case.grad_output)
        done = tuple(b - a for a, b in zip(before, counted(), strict=True))
        assert done == (1, 1, 0), pytorch.status()
        return {"output": output.detach(), **dict(zip(case.names, found, strict=True))}

    tensors = (randn(2, 4, 200, 64, dtype=torch.bfloat16) for _ in range(3))
    assert_right(Call(*tensors, options={"is_causal": True}), results=compiled)


@pytest.mark.gpu
@pytest.mark.usefixtures("activated")
def test_gpu_dropout_is_pytorchs_in_both_directions() -> None:
    leaves = [randn(2, 4, 128, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.manual_seed(3)
        ours = F.scaled_dot_product_attention(*leaves, dropout_p=0.25)
        grads = torch.autograd.grad(ours.sum(), leaves)
        assert pytorch.status().reasons == {"flash_dropout": 2}
        registry.restore_flash_attention_impl()
        torch.manual_seed(3)
        theirs = F.scaled_dot_product_attention(*leaves, dropout_p=0.25)
        wanted = torch.autograd.grad(theirs.sum(), leaves)
    registry.activate_flash_attention_impl("cudnn_mha")
    assert torch.equal(ours, theirs)
    for got, want in zip(grads, wanted, strict=True):
        close(got, want, 2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("activated")
def test_gpu_no_key_for_a_sequence() -> None:
    query = randn(6, 4, 64, dtype=torch.bfloat16)
    key = randn(5, 4, 64, dtype=torch.bfloat16)
    cu_q = torch.tensor([0, 4, 6], device="cuda", dtype=torch.int32)
    cu_k = torch.tensor([0, 0, 5], device="cuda", dtype=torch.int32)
    output, lse = varlen_attn(query, key, key, cu_q, cu_k, 4, 5, return_aux=AuxRequest(lse=True))
    assert (output[:4] == 0).all()
    assert (lse[:, :4] == -math.inf).all()
    assert output[4:].isfinite().all()
    assert lse[:, 4:].isfinite().all()
