"""`cudnn_sdpa` under `torch.compile` and `torch.export`, without a GPU.

Two ways around the missing GPU: CPU tensors that are let to the operators show values, fake CUDA
tensors show what the real rule sends there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from cudnn_mha import CudnnSdpaUnsupportedError, cudnn_sdpa, functional, reference
from cudnn_mha.config import DISABLED, reload

B, H, S, D = 2, 4, 12, 8
BACKENDS = ["eager", "aot_eager"]

FORWARD = "cudnn_mha.sdpa_forward"
INFERENCE = "cudnn_mha.sdpa_inference"
PYTORCHS = "scaled_dot_product_attention"

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the operators as CUDA tensors of half precision do."""
    monkeypatch.setattr(functional, "_for_the_operators", lambda query: True)


def randn(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def qkv(heads: tuple[int, int, int] = (H, H, H), dim_v: int = D, grad: bool = True) -> list[Tensor]:
    dims = (D, D, dim_v)
    return [randn(B, h, S, d, grad=grad) for h, d in zip(heads, dims, strict=True)]


def close(got: Any, want: Any) -> None:
    """Equal but for the log-sum-exp, which is float32, and which the backward uses."""
    torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)


def operations(backend: EagerAndRecordGraphs) -> list[str]:
    """The attention operations in the one graph that was compiled."""
    (graph,) = backend.graphs
    targets = [n.target for n in graph.graph.nodes]
    names = [PYTORCHS if t is F.scaled_dot_product_attention else str(t) for t in targets]
    return [name for name in names if name in (FORWARD, INFERENCE, PYTORCHS)]


def traced(function: Function, *tensors: Tensor) -> tuple[list[str], Any]:
    """The attention operations that a call becomes, and its result."""
    backend = EagerAndRecordGraphs()
    result = torch.compile(function, fullgraph=True, backend=backend)(*tensors)
    return operations(backend), result


def same_compiled(
    function: Function,
    exact: Function,
    *tensors: Tensor,
    backend: str = "aot_eager",
    dynamic: bool | None = None,
) -> None:
    """Output and gradients of the compiled function are the exact ones."""
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    got, want = compiled(*tensors), exact(*tensors)
    close(got, want)
    leaves = [t for t in tensors if t.requires_grad]
    upstream = torch.randn_like(want)
    gradients = torch.autograd.grad(got, leaves, upstream)
    close(gradients, torch.autograd.grad(want, leaves, upstream))


def definition(*args: Any, **options: Any) -> Tensor:
    """Attention in float64 from its definition, masks and all."""
    query, key, value, *mask = args
    if mask and mask[0] is not None and mask[0].dtype != torch.bool:
        mask = [mask[0].double()]
    options.pop("enable_gqa", None)
    return reference.attention(query, key, value, *mask, compute_dtype=torch.float64, **options)[0]


# ----------------------------------------------------------------------------------------- values


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -0.3}], ids=str)
def test_one_graph_gives_output_and_gradients(backend: str, options: dict[str, Any]) -> None:
    same_compiled(
        lambda q, k, v: cudnn_sdpa(q * 2, k, v, **options).sin(),
        lambda q, k, v: definition(q * 2, k, v, **options).sin(),
        *qkv(),
        backend=backend,
    )


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 1, 1), (4, 2, 1)], ids=str)
def test_grouped_heads(heads: tuple[int, int, int]) -> None:
    options = {"enable_gqa": True, "is_causal": True}
    same_compiled(
        lambda *t: cudnn_sdpa(*t, **options), lambda *t: definition(*t, **options), *qkv(heads, 16)
    )


@pytest.mark.usefixtures("operators")
def test_projections_as_models_have_them() -> None:
    """``(B, S, H, D)`` transposed, and one packed projection: strides go to the operator as is."""
    separate = [randn(B, S, h, D) for h in (4, 2, 2)]
    packed = randn(B, S, 3, H, D)
    options = {"enable_gqa": True, "is_causal": True}

    def transposed(attention: Function) -> Function:
        return lambda *t: attention(*(x.transpose(1, 2) for x in t), **options).transpose(1, 2)

    def unpacked(attention: Function) -> Function:
        return lambda x: attention(*x.permute(2, 0, 3, 1, 4).unbind(), **options)

    same_compiled(transposed(cudnn_sdpa), transposed(definition), *separate)
    same_compiled(unpacked(cudnn_sdpa), unpacked(definition), packed)
    output = torch.compile(transposed(cudnn_sdpa), fullgraph=True, backend="aot_eager")(*separate)
    assert output.is_contiguous()  # the memory order of the query, so the transpose is free


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("shape", [(S,), (S, 1), (H, 1, S), (B, 1, S, S)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "gradient"])
def test_masks(shape: tuple[int, ...], kind: str) -> None:
    mask = torch.randn(shape)
    mask = mask > -0.5 if kind == "bool" else mask.requires_grad_(kind == "gradient")
    same_compiled(cudnn_sdpa, definition, *qkv(), mask)


@pytest.mark.usefixtures("operators")
def test_gradient_of_a_mask_that_is_expanded_in_the_graph() -> None:
    slopes = torch.randn(H, 1, 1, requires_grad=True)

    def biased(attention: Function) -> Function:
        return lambda q, k, v, s: attention(q, k, v, s.expand(B, H, S, S))

    same_compiled(biased(cudnn_sdpa), biased(definition), *qkv(), slopes)


def low_rows() -> Tensor:
    mask = torch.randn(S, S)
    mask[3] -= 2e4  # a row without a larger entry: it is shifted, and shifted back
    mask[5] = -torch.inf
    return mask


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dims", [3, 4])
def test_log_sum_exp(dims: int) -> None:
    tensors = qkv(grad=False) if dims == 4 else [randn(H, S, D, grad=False) for _ in range(3)]
    mask = low_rows()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cudnn_sdpa(q, k, v, mask, return_lse=True)

    found, (output, lse) = traced(attention, *tensors)
    assert found == [FORWARD]
    want, want_lse = reference.attention(*tensors, mask.double(), compute_dtype=torch.float64)
    close(output, want)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)


# Dynamo's own, where it goes on behind the break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dims", [3, 4])
def test_the_gradient_of_a_log_sum_exp_breaks_the_graph(dims: int) -> None:
    """Operators have none; the call as it is has it."""
    tensors = qkv() if dims == 4 else [randn(H, S, D) for _ in range(3)]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cudnn_sdpa(q * 2, k, v, is_causal=True, return_lse=True)

    assert torch._dynamo.explain(attention)(*tensors).break_reasons
    found = torch.compile(attention, backend="aot_eager")(*tensors)
    query, *rest = tensors
    wanted = reference.attention(query * 2, *rest, is_causal=True)
    close(found[0], wanted[0])
    upstream = torch.randn_like(wanted[0]), torch.randn(wanted[1].shape)
    close(
        *(
            torch.autograd.grad((o * upstream[0]).sum() + (lse * upstream[1]).sum(), tensors)
            for o, lse in (found, wanted)
        )
    )


@pytest.mark.usefixtures("operators")
def test_inductor() -> None:
    same_compiled(
        lambda x: cudnn_sdpa(*x.permute(2, 0, 3, 1, 4).unbind(), is_causal=True).transpose(1, 2),
        lambda x: definition(*x.permute(2, 0, 3, 1, 4).unbind(), is_causal=True).transpose(1, 2),
        randn(B, S, 3, H, D),
        backend="inductor",
    )


# --------------------------------------------------------------------------------- changing shapes


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("masked", [False, True])
def test_lengths_share_one_graph(masked: bool) -> None:
    """Another length is no other graph, forward and backward."""
    counter = CompileCounter()

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return cudnn_sdpa(q, k, v, mask, is_causal=mask is None, enable_gqa=True)

    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    for length in (13, 17, 40, 101):
        tensors = [randn(B, length, h, 6) for h in (4, 2, 2)]
        mask = torch.rand(B, 1, length, length) > 0.2 if masked else None
        output = compiled(*tensors, mask)
        q, k, v = (t.transpose(1, 2) for t in tensors)
        want = definition(q, k, v, mask, is_causal=not masked)
        close(output, want)
        close(torch.autograd.grad(output.sum(), tensors), torch.autograd.grad(want.sum(), tensors))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("operators")
def test_lengths_share_one_graph_through_autograds_tracing() -> None:
    """The same where also the backward is traced ahead, with the strides it announces."""
    compiled = torch.compile(
        lambda q, k, v: cudnn_sdpa(q, k, v, is_causal=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (13, 17, 40, 101):
            tensors = [randn(B, H, length, d) for d in (6, 6, 10)]
            output = compiled(*tensors)
            want, _ = reference.attention(*tensors, is_causal=True)
            close(output, want)
            close(
                torch.autograd.grad(output.sum(), tensors), torch.autograd.grad(want.sum(), tensors)
            )


# ----------------------------------------------------------------------------------- checkpointing


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing(compiled: bool) -> None:
    def block(attention: Function) -> Function:
        return lambda q, k, v: attention(q.sin(), k, v, is_causal=True).cos()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(block(cudnn_sdpa), q, k, v, use_reentrant=False)

    tensors = qkv()
    want = block(definition)(*tensors)
    if compiled:
        same_compiled(run, block(definition), *tensors)
    else:
        close(
            torch.autograd.grad(run(*tensors).sum(), tensors),
            torch.autograd.grad(want.sum(), tensors),
        )


@pytest.mark.usefixtures("operators")
def test_checkpointing_drops_the_same_weights_again() -> None:
    query, key = torch.zeros(2, B, H, 32, D).unbind()
    value = torch.eye(32).expand(B, H, 32, 32).clone().requires_grad_()

    def run(value: Tensor) -> Any:
        return checkpoint(
            lambda v: cudnn_sdpa(query, key, v, dropout_p=0.5),
            value,
            use_reentrant=False,
        )

    output = torch.compile(run, fullgraph=True, backend="aot_eager")(value)
    (grad,) = torch.autograd.grad(output, value, value.detach())
    assert 0.4 < (output == 0).double().mean() < 0.6
    assert torch.equal(output.detach(), grad.mT)


# ------------------------------------------------------------------------------------------ export


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cudnn_sdpa(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    length = torch.export.Dim("length", min=2)
    tensors = qkv((4, 2, 1), grad=False)
    program = torch.export.export(
        Attention(), tuple(tensors), dynamic_shapes=[{2: length}] * 3, strict=strict
    )
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert [t for t in targets if t.startswith("cudnn_mha")] == [f"{INFERENCE}.default"]
    assert not [t for t in targets if "attention" in t]
    for tensor in (tensors, [randn(B, h, 30, D, grad=False) for h in (4, 2, 1)]):
        close(program.module()(*tensor), definition(*tensor, is_causal=True))


@pytest.mark.usefixtures("operators")
def test_exported_gradients() -> None:
    tensors = qkv((4, 2, 1))
    program = torch.export.export(Attention(), tuple(tensors))
    targets = [str(n.target) for n in program.graph.nodes]
    assert f"{FORWARD}.default" in targets
    output, want = program.module()(*tensors), definition(*tensors, is_causal=True)
    close(output, want)
    close(torch.autograd.grad(output.sum(), tensors), torch.autograd.grad(want.sum(), tensors))


# ------------------------------------------------------------------------ what a call is traced to


@pytest.mark.usefixtures("operators")
def test_a_gradient_decides_between_the_operators() -> None:
    training, plain = qkv(), qkv(grad=False)
    assert traced(cudnn_sdpa, *training)[0] == [FORWARD]
    assert traced(cudnn_sdpa, *plain)[0] == [INFERENCE]
    with torch.no_grad():
        assert traced(cudnn_sdpa, *training)[0] == [INFERENCE]
    mask = torch.zeros(S, S)
    assert traced(cudnn_sdpa, *plain, mask)[0] == [INFERENCE]
    assert traced(cudnn_sdpa, *plain, mask.clone().requires_grad_())[0] == [FORWARD]


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("setting", [False, True])
def test_arguments_reach_the_operator(setting: bool) -> None:
    backend = EagerAndRecordGraphs()
    torch.use_deterministic_algorithms(setting)
    try:
        torch.compile(
            lambda q, k, v: cudnn_sdpa(
                q, k, v, torch.zeros(S, S), 0.25, scale=0.5, workspace_limit="2KiB", fallback=True
            ),
            fullgraph=True,
            backend=backend,
        )(*qkv())
    finally:
        torch.use_deterministic_algorithms(False)
    (graph,) = backend.graphs
    (node,) = [n for n in graph.graph.nodes if str(n.target) == FORWARD]
    assert node.args[4:] == (0.25, False)
    assert node.kwargs == {
        "scale": 0.5,
        "bias_gradient": False,
        "deterministic": setting,
        "workspace_limit": 2048,
        "fallback": True,
    }


@pytest.mark.usefixtures("operators")
def test_without_fallback_the_reasons_are_raised() -> None:
    compiled = torch.compile(
        lambda *t: cudnn_sdpa(*t, fallback=False), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(CudnnSdpaUnsupportedError) as error:
        compiled(*qkv())
    assert {"device", "dtype"} <= {reason.rule for reason in error.value.reasons}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_cpu_tensors_are_traced_to_pytorchs_attention(dtype: torch.dtype) -> None:
    tensors = [t.detach().to(dtype).requires_grad_() for t in qkv()]
    found, output = traced(cudnn_sdpa, *tensors)
    assert found == [PYTORCHS]
    torch.testing.assert_close(output, F.scaled_dot_product_attention(*tensors))
    found, output = traced(lambda *t: cudnn_sdpa(*t, return_lse=True), *tensors)
    assert found == []  # the definition, which has a log-sum-exp
    want, lse = reference.attention(*tensors)
    torch.testing.assert_close(output, (want, lse.float()))


@pytest.fixture
def fake_cuda() -> Any:
    """Tensors on a GPU that is not there."""
    with FakeTensorMode():
        yield


def cuda(
    *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as models have them: ``(B, S, H, D)`` in memory."""
    q, k, v = (torch.empty(B, S, H, D, device="cuda", dtype=dtype).transpose(1, 2),) * 3
    return q.detach().requires_grad_(grad), k, v


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_on_cuda_is_for_the_operators(dtype: torch.dtype) -> None:
    found, output = traced(cudnn_sdpa, *cuda(dtype=dtype))
    assert found == [INFERENCE]
    assert output.device.type == "cuda" and output.dtype == dtype
    assert output.shape == (B, H, S, D) and output.stride() == (S * H * D, D, H * D, 1)
    found, (output, lse) = traced(lambda *t: cudnn_sdpa(*t, return_lse=True), *cuda(dtype=dtype))
    assert found == [FORWARD]
    assert output.stride() == (S * H * D, D, H * D, 1)
    assert lse.device.type == "cuda" and lse.dtype == torch.float32 and lse.shape == (B, H, S)
    found, output = traced(lambda *t: cudnn_sdpa(*(x[0] for x in t)), *cuda(dtype=dtype))
    assert found == [INFERENCE]
    assert output.shape == (H, S, D) and output.stride() == (D, H * D, 1)


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_other_dtypes_on_cuda_are_pytorchs(dtype: torch.dtype, grad: bool) -> None:
    found, output = traced(cudnn_sdpa, *cuda(dtype=dtype, grad=grad))
    assert found == [PYTORCHS]
    assert output.device.type == "cuda" and output.dtype == dtype


@pytest.mark.usefixtures("fake_cuda")
def test_users_switches_keep_the_operators_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = cuda()
    monkeypatch.setenv(DISABLED, "1")
    reload()
    try:
        assert traced(cudnn_sdpa, *tensors)[0] == [PYTORCHS]
    finally:
        monkeypatch.undo()
        reload()
    torch._dynamo.reset()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert traced(cudnn_sdpa, *tensors)[0] == [PYTORCHS]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    torch._dynamo.reset()

    def inside(*t: Tensor) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return cudnn_sdpa(*t)

    assert traced(inside, *tensors)[0] == [PYTORCHS]
    torch._dynamo.reset()
    assert traced(cudnn_sdpa, *tensors)[0] == [INFERENCE]


@pytest.mark.usefixtures("fake_cuda")
def test_functional_gradients_are_pytorchs() -> None:
    """PyTorch gives operators from outside no functorch gradients."""
    tensors = cuda()
    found, output = traced(lambda *t: torch.func.vjp(cudnn_sdpa, *t)[0], *tensors)
    assert found == [PYTORCHS]
    assert output.shape == (B, H, S, D)


@pytest.mark.usefixtures("operators")
def test_vmap_in_compiled_code() -> None:
    query, key, value = randn(3, B, H, S, D, grad=False), *qkv(grad=False)[1:]
    found, output = traced(torch.vmap(cudnn_sdpa, (0, None, None)), query, key, value)
    assert found == [INFERENCE]
    close(output, torch.stack([definition(q, key, value) for q in query]))


@pytest.mark.usefixtures("fake_cuda")
def test_fake_tensors_outside_of_a_compiler_have_the_shapes_of_a_call() -> None:
    tensors = cuda()
    output, lse = cudnn_sdpa(*tensors, return_lse=True)
    assert output.device.type == lse.device.type == "cuda"
    assert output.shape == (B, H, S, D) and output.stride() == (S * H * D, D, H * D, 1)
    assert (output.dtype, lse.dtype, lse.shape) == (torch.bfloat16, torch.float32, (B, H, S))
    plain = cudnn_sdpa(*tensors)
    assert (plain.device, plain.dtype, plain.shape) == (output.device, output.dtype, output.shape)
