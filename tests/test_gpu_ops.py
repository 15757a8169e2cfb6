"""The operators and compiled code on the GPU: values against float64, and PyTorch's machinery."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.cpp_extension import CUDA_HOME

from cudnn_mha import CudnnSdpaUnsupportedError, cudnn_sdpa
from cudnn_mha.inputs import row_shift
from cudnn_mha.ops import sdpa_backward, sdpa_forward, sdpa_inference
from tests.oracle import NAMES, Call, Results, assert_right, failures
from tests.test_gpu_values import BF16, FP16, FP32, LAYOUTS, call, call_with_gradient, randn

pytestmark = pytest.mark.gpu

B, H, S, D = 2, 4, 200, 64

the_compilers_own = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def by_operators(case: Call, *, gradients: bool = True, **options: Any) -> Results:
    """Output, LSE and gradients through the operators; anything but cuDNN raises."""
    leaves = case.leaves()
    given = {"fallback": False, "scale": case.options.get("scale"), **options}
    mask = leaves[3] if len(leaves) > 3 else case.mask
    arguments = (*leaves[:3], mask, 0.0, bool(case.options.get("is_causal")))
    if not gradients:
        with torch.no_grad():
            return {"output": sdpa_inference(*arguments, **given)}
    output, lse, *_ = sdpa_forward(*arguments, bias_gradient=len(leaves) > 3, **given)
    lse = lse.squeeze(-1)
    if mask is not None and mask.dtype != torch.bool:
        lse = lse + row_shift(mask).squeeze(-1)
    found = torch.autograd.grad(output, leaves, case.grad_output)
    results = {"output": output.detach(), "lse": lse}
    return results | dict(zip(NAMES, found, strict=False))


def right(case: Call) -> None:
    """Both with a gradient in view and without."""
    assert_right(case, results=by_operators)
    assert_right(case, gradients=False, results=by_operators)


def near(got: Tensor, want: Tensor, tolerance: float = 0.005) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (got.double() - want.double()).norm() <= tolerance * want.double().norm()


# ----------------------------------------------------------------------------------------- values

CASES: dict[str, Callable[[], Call]] = {
    "plain": lambda: call(),
    "causal_fp16": lambda: call(dtype=FP16, is_causal=True),
    "gqa": lambda: call(heads=(8, 2, 2), is_causal=True),
    "gqa_of_two_kinds": lambda: call(heads=(8, 4, 2)),
    "mqa": lambda: call(heads=(8, 1, 1), lengths=(64, 704)),
    "one_query": lambda: call(lengths=(1, 300)),
    "dv": lambda: call(dims=(192, 128), is_causal=True),
    "padded": lambda: call(dims=(100, 100), is_causal=True),
    "padded_dv": lambda: call(dims=(100, 36)),
    "scale_zero": lambda: call(scale=0.0),
    "scale_below_zero": lambda: call(scale=-0.3, is_causal=True),
    "scale_below_zero_padded": lambda: call(scale=-0.3, dims=(20, 20)),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    right(CASES[name]())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    case = Call(*LAYOUTS[layout](), options={"is_causal": True})
    right(case)
    output, *_ = sdpa_forward(case.query, case.key, case.value, None, 0.0, True, fallback=False)
    assert output.stride() == torch.empty_like(case.query).stride()
    for tensor, name in zip((case.query, case.key, case.value), NAMES, strict=False):
        assert by_operators(case)[name].stride() == torch.empty_like(tensor).stride()


@pytest.mark.parametrize("shape", [(S, 333), (333,), (B, 1, 1, 333), (1, H, S, 1)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float32", "bfloat16"])
def test_masks(shape: tuple[int, ...], kind: str) -> None:
    if kind == "bool":
        mask = torch.rand(shape, device="cuda") > 0.3
    else:
        mask = randn(*shape, dtype=getattr(torch, kind))
        mask[..., ::7] = -math.inf if shape[-1] > 1 else 0
    right(call(heads=(4, 2, 2), lengths=(S, 333), mask=mask))


@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_rows_that_attend_to_nothing(kind: str) -> None:
    keep = torch.rand(B, 1, S, 192, device="cuda") > 0.3
    keep[0, :, 0] = False
    keep[1, :, S // 2 :] = False
    mask = keep
    if kind == "float32":
        mask = torch.zeros(keep.shape, device="cuda").masked_fill(~keep, -math.inf)
    case = call(lengths=(S, 192), mask=mask)
    right(case)
    got = by_operators(case)
    assert (got["output"][0, :, 0] == 0).all() and (got["grad_query"][0, :, 0] == 0).all()
    assert (got["lse"][0, :, 0] == -math.inf).all()


@pytest.mark.parametrize("low", [-1e9, -2e4])
def test_rows_of_very_low_mask_values(low: float) -> None:
    """The operator's log-sum-exp is less the row's largest entry, and keeps its digits."""
    mask = randn(B, 1, S, 192, dtype=FP32)
    mask[:, :, :3] += low
    mask.requires_grad_()
    case = call_with_gradient(call(lengths=(S, 192), mask=mask))
    peak = row_shift(mask)
    # A constant on a whole row changes nothing; less it, float64 and float32 hold every digit.
    shifted = (mask.detach() - peak).double().requires_grad_()
    got = by_operators(case)
    tensors = case.leaves(torch.float64)[:3]
    scores = tensors[0] @ tensors[1].mT / D**0.5 + shifted
    want = scores.softmax(-1) @ tensors[2]
    assert case.grad_output is not None
    grads = torch.autograd.grad(want, [*tensors, shifted], case.grad_output.double())
    for name, exact in zip(("output", *NAMES[:4]), (want.detach(), *grads), strict=True):
        assert (got[name].double() - exact).norm() < 0.01 * exact.norm(), name
    _, lse, *_ = sdpa_forward(case.query, case.key, case.value, mask.detach(), fallback=False)
    error = (lse.squeeze(-1).double() - scores.detach().logsumexp(-1)).abs().max()
    assert error < 2e-3


@pytest.mark.parametrize("shape", [(S, 333), (333,), (B, 1, 1, 333), (H, S, 1), (1, 1)], ids=str)
def test_gradients_of_broadcast_masks(shape: tuple[int, ...]) -> None:
    mask = randn(*shape, dtype=FP32).requires_grad_()
    assert_right(call(heads=(4, 2, 2), lengths=(S, 333), mask=mask), results=by_operators)


def test_gradient_of_an_expanded_mask() -> None:
    case = call_with_gradient(call())
    base = randn(1, H, 1, S, dtype=FP32).requires_grad_()
    tensors = (case.query, case.key, case.value)
    found: list[Tensor] = []
    for mask in (base, base.expand(B, H, S, S)):
        output, *_ = sdpa_forward(*tensors, mask, bias_gradient=True, fallback=False)
        found += torch.autograd.grad(output, base, case.grad_output)
    near(found[1], found[0])
    bias = base.detach().double().requires_grad_()
    exact = (case.query.double() @ case.key.double().mT / D**0.5 + bias).softmax(-1)
    assert case.grad_output is not None
    (want,) = torch.autograd.grad(exact @ case.value.double(), bias, case.grad_output.double())
    near(found[0].double(), want, 0.01)


def test_parts() -> None:
    """More heads than one launch takes."""
    shape = (65540, 1, 8, 16)
    mask = torch.rand(shape[0], 1, 1, 8, device="cuda") > 0.3
    assert_right(Call(randn(*shape), randn(*shape), randn(*shape), mask), results=by_operators)


def test_the_rule_finds_a_wrong_result() -> None:
    """What the tests above rely on."""
    case = call(is_causal=True)

    def wrong(case: Call, **options: Any) -> Results:
        got = by_operators(case, **options)
        return got | {"grad_key": got["grad_key"] * 1.05}

    assert [f.split(":")[0] for f in failures(case, results=wrong)] == ["grad_key"]


def test_what_cudnn_does_not_serve_is_plain_pytorchs_or_an_error() -> None:
    query = torch.randn(B, H, 16, D, device="cuda", requires_grad=True)
    with pytest.raises(CudnnSdpaUnsupportedError, match="float32"):
        sdpa_forward(query, query, query, None, fallback=False)
    output, lse, *_ = sdpa_forward(query, query, query, None)
    want = (query @ query.mT / D**0.5).softmax(-1) @ query
    torch.testing.assert_close(output, want, rtol=1e-2, atol=1e-3)
    assert lse.shape == (B, H, 16, 1)
    upstream = torch.randn_like(want)
    got = torch.autograd.grad(output, query, upstream)
    torch.testing.assert_close(
        got, torch.autograd.grad(want, query, upstream), rtol=1e-2, atol=1e-2
    )


def test_dropout() -> None:
    """The seed reproduces it, and the backward drops what the forward dropped."""
    p, keys = 0.2, 128
    query = torch.zeros(8, 16, keys, 128, device="cuda", dtype=FP16)
    key = randn(8, 16, keys, 128, dtype=FP16)
    eye = torch.eye(128, device="cuda", dtype=FP16).expand(8, 16, keys, 128).contiguous()

    def run(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        value = eye.clone().requires_grad_()
        output, _, drawn, offset = sdpa_forward(query, key, value, None, p, fallback=False)
        assert drawn.shape == offset.shape == () and drawn.is_cuda and offset.is_cuda
        (grad,) = torch.autograd.grad(output, value, eye)
        return output.detach(), grad.mT

    output, back = run(1)
    assert torch.equal(output == 0, back == 0)
    rate = (output == 0).double().mean().item()
    assert abs(rate - p) < 5 * math.sqrt(p * (1 - p) / output.numel())
    kept = output[output != 0].double() * keys * (1 - p)
    assert abs(kept.mean().item() - 1) < 1e-3
    assert torch.equal(run(1)[0], output)
    assert abs(((run(2)[0] == 0) != (output == 0)).double().mean().item() - 0.32) < 0.01
    plain = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        plain.append(sdpa_inference(query, key, eye, None, p, fallback=False) == 0)
    assert abs(plain[0].double().mean().item() - p) < 0.002
    assert torch.equal(plain[0], plain[1]) and not torch.equal(plain[0], plain[2])


def test_autocast() -> None:
    tensors = [torch.randn(B, H, S, D, device="cuda", requires_grad=True) for _ in range(3)]
    half = [t.detach().bfloat16().requires_grad_() for t in tensors]
    with torch.autocast("cuda", BF16):
        output, *_ = sdpa_forward(*tensors, None, 0.0, True, fallback=False, deterministic=True)
    want, *_ = sdpa_forward(*half, None, 0.0, True, fallback=False, deterministic=True)
    assert output.dtype == BF16
    assert torch.equal(output, want)
    upstream = torch.randn_like(want)
    got = torch.autograd.grad(output, tensors, upstream)
    for grad, exact in zip(got, torch.autograd.grad(want, half, upstream), strict=True):
        assert grad.dtype == FP32 and torch.equal(grad, exact.float())


# ------------------------------------------------------------------------------- PyTorch's checks


# opcheck's own: it looks at the gradients of its copies.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["bshd_gqa", "padded_dv", "bias_gradient"])
def test_opcheck(kind: str) -> None:
    query = randn(B, 72, 4, D).transpose(1, 2)
    key, value = (randn(B, 80, 2, D).transpose(1, 2) for _ in range(2))
    mask = None
    if kind == "padded_dv":
        query, key, value = query[..., :20], key[..., :20], value[..., :36]
    elif kind == "bias_gradient":
        mask = randn(4, 1, 80, dtype=FP32).requires_grad_()
    # Deterministic, because it compares gradients of two runs.
    options = {"fallback": False, "deterministic": True}
    options["bias_gradient"] = mask is not None
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    arguments = (*leaves, mask, 0.0, mask is None)
    results = opcheck(sdpa_forward.default, arguments, options)
    assert set(results.values()) == {"SUCCESS"}
    plain = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
    results = opcheck(sdpa_inference.default, tuple(plain), {"fallback": False})
    assert set(results.values()) == {"SUCCESS"}
    output, *stash = sdpa_forward(*plain, **options)
    backward = (torch.randn_like(output), *plain[:3], output, *stash, *plain[3:])
    results = opcheck(sdpa_backward.default, backward, options)
    assert set(results.values()) == {"SUCCESS"}


# ---------------------------------------------------------------------------------- compiled code


def block(packed: Tensor) -> Tensor:
    """Attention as a model has it: one packed projection in, ``(B, S, H * D)`` out."""
    query, key, value = packed.mul(1.5).permute(2, 0, 3, 1, 4).unbind()
    output = cudnn_sdpa(query, key, value, is_causal=True, fallback=False)
    return output.transpose(1, 2).flatten(2)


def same_as_eager(
    compiled: Callable[[Tensor], Tensor], packed: Tensor, eager: Callable[[Tensor], Tensor] = block
) -> None:
    """Output and gradient are those of the same function as it is."""
    got, want = compiled(packed), eager(packed)
    near(got.detach(), want.detach())
    upstream = torch.randn_like(want)
    # A replay overwrites what it returned: look at it before the next.
    grads = torch.autograd.grad(got, packed, upstream)
    near(grads[0], torch.autograd.grad(want, packed, upstream)[0])


@the_compilers_own
def test_inductor_with_changing_lengths() -> None:
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (128, 129, 500, 777, 1000):
            same_as_eager(compiled, randn(B, length, 3, H, D).requires_grad_())


@the_compilers_own
def test_reduce_overhead_replays_right_values() -> None:
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    packed = randn(B, S, 3, H, D).requires_grad_()
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        packed.data.normal_()
        same_as_eager(compiled, packed)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_cuda_graph_of_the_operators() -> None:
    case = call_with_gradient(call(heads=(8, 2, 2)))
    leaves = case.leaves()

    def run() -> tuple[Tensor, ...]:
        output, *_ = sdpa_forward(*leaves, None, 0.0, True, fallback=False)
        return (output, *torch.autograd.grad(output, leaves, case.grad_output))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for factor in (0.5, 3.0):
        for leaf in leaves:
            leaf.data.mul_(factor)
        graph.replay()
        for got, want in zip(captured, run(), strict=True):
            near(got.detach(), want.detach())


@the_compilers_own
@pytest.mark.parametrize("masked", [False, True])
def test_checkpointed_compiled_code_under_autocast(masked: bool) -> None:
    bias = torch.randn(H, 1, S, device="cuda", requires_grad=masked)

    def attention(packed: Tensor, bias: Tensor) -> Tensor:
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind()
        mask = bias if masked else None
        return cudnn_sdpa(query, key, value, mask, is_causal=not masked, fallback=False).sin()

    def run(packed: Tensor, bias: Tensor) -> Any:
        with torch.autocast("cuda", BF16):
            return checkpoint(attention, packed, bias, use_reentrant=False)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    packed = torch.randn(B, S, 3, H, D, device="cuda", requires_grad=True)
    got, want = compiled(packed, bias), run(packed, bias)
    assert got.dtype == BF16
    near(got.detach(), want.detach())
    upstream = torch.randn_like(want)
    leaves = [packed, bias] if masked else [packed]
    grads = torch.autograd.grad(got, leaves, upstream)
    for a, b in zip(grads, torch.autograd.grad(want, leaves, upstream), strict=True):
        assert a.dtype == FP32
        near(a, b)


def assert_dropped_alike(attend: Callable[..., Any], rate: float) -> None:
    """Scores are all alike and values unit vectors, so both show which weights were dropped."""
    query, key = torch.zeros(2, 8, 16, 128, 128, device="cuda", dtype=FP16).unbind()
    value = torch.eye(128, device="cuda", dtype=FP16).expand(8, 16, 128, 128).contiguous()
    upstream = value.clone()
    value.requires_grad_()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    draws = []
    for _ in range(2):
        output = compiled(query, key, value)
        (grad,) = torch.autograd.grad(output, value, upstream)
        assert torch.equal(output == 0, grad.mT == 0)
        draws.append(output == 0)
    assert abs(draws[0].double().mean().item() - rate) < 0.002
    # Two draws differ where one drops and the other does not.
    differ = 2 * rate * (1 - rate)
    assert abs((draws[0] != draws[1]).double().mean().item() - differ) < 0.01


@the_compilers_own
def test_compiled_dropout_of_backward_is_that_of_forward() -> None:
    assert_dropped_alike(lambda *t: cudnn_sdpa(*t, dropout_p=0.2, fallback=False), 0.2)


# ------------------------------------------------------------------------------------------ export


class Attention(nn.Module):
    def forward(self, packed: Tensor) -> Tensor:
        return block(packed)


def exported() -> torch.export.ExportedProgram:
    """A program for any length."""
    length = torch.export.Dim("length", min=2, max=4096)
    with torch.no_grad():
        return torch.export.export(
            Attention(), (randn(B, S, 3, H, D),), dynamic_shapes=({1: length},)
        )


@the_compilers_own
def test_exported_program() -> None:
    program = exported()
    assert "cudnn_mha.sdpa_inference.default" in {str(n.target) for n in program.graph.nodes}
    for length in (S, 333):
        packed = randn(B, length, 3, H, D)
        near(program.module()(packed), block(packed))


PLAIN_PACKAGE = """
import sys, torch

class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x

x = torch.ones(4, device="cuda")
program = torch.export.export(Double(), (x,))
path = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
assert (torch._inductor.aoti_load_package(path)(x) == 2).all()
"""


@the_compilers_own
def test_ahead_of_time_compiled_package(tmp_path: Path) -> None:
    if CUDA_HOME is None:
        pytest.skip("AOTInductor builds against CUDA's headers, which are not installed")
    plain = [sys.executable, "-c", PLAIN_PACKAGE, str(tmp_path / "plain.pt2")]
    if subprocess.run(plain, check=False, capture_output=True).returncode:
        pytest.skip("this PyTorch cannot load even a package without attention")
    path = torch._inductor.aoti_compile_and_package(
        exported(), package_path=str(tmp_path / "attention.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    for length in (S, 333):
        packed = randn(B, length, 3, H, D)
        near(package(packed), block(packed))
