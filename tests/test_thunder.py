"""cuDNN attention as an executor of Lightning Thunder: what it claims, and what the trace computes.

On the CPU the operators compute by plain PyTorch, so values are real; that a call is on a GPU, and
which, is made up where a test says so.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cudnn_mha
from cudnn_mha import dispatch, explain
from cudnn_mha.checks import Reason
from tests.oracle import NAMES, Call, Results, assert_right
from tests.test_gpu_values import BF16, FP16, call, randn

FOUND = importlib.util.find_spec("thunder") is not None
LOADS = FOUND and hasattr(torch.Tensor, "align_as")  # all releases up to 0.2.6 name it

needs_thunder = pytest.mark.skipif(
    not LOADS,
    reason="Lightning Thunder "
    + ("does not load with this PyTorch, which has no Tensor.align_as" if FOUND else "is absent"),
)

if LOADS:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it finds no Transformer Engine
        import thunder
        from thunder.core.devices import Device
        from thunder.core.transform_common import NON_FUNCTIONAL_OPS

        from cudnn_mha.integrations import thunder as integration

# It asks PyTorch about autocast by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:torch.is_autocast_cpu_enabled:DeprecationWarning")

B, H, S, D = 2, 4, 8, 16

FORWARD = ["cudnn_mha_sdpa_forward"]
BACKWARD = ["cudnn_mha_sdpa_backward"]
INFERENCE = ["cudnn_mha_sdpa_inference"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the executor take CPU tensors for those of a GPU that serves everything."""
    monkeypatch.setattr(integration, "_on_one_gpu", lambda *tensors: True)
    monkeypatch.setattr(integration, "_explain", lambda *a, **o: SimpleNamespace(reasons=()))


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the executor take CPU tensors for those of an H200, for which cuDNN itself answers."""

    def verdict(index: Any, *tensors: Any, **options: Any) -> Any:
        return explain(*tensors, gpu="h200", **options)

    monkeypatch.setattr(integration, "_on_one_gpu", lambda *tensors: True)
    monkeypatch.setattr(integration, "_explain", verdict)


def claimed(traces: Any) -> list[str]:
    """Our operators in the last of these traces, in order."""
    return re.findall(r"^(?!\s*#).*= (cudnn_mha_\w+)\(", str(traces[-1]), re.MULTILINE)


def jit(function: Any) -> Any:
    return thunder.jit(function, executors=["cudnn_mha"])


def near(got: Tensor, want: Tensor, tolerance: float = 0.01) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (got.double() - want.double()).norm() <= tolerance * want.double().norm() + 1e-6


def leaves(
    kv_heads: int = H, lengths: tuple[int, int] = (S, S), dims: tuple[int, int] = (D, D)
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (
        (B, H, lengths[0], dims[0]),
        (B, kv_heads, lengths[1], dims[0]),
        (B, kv_heads, lengths[1], dims[1]),
    )
    return [torch.randn(*shape).to(BF16).requires_grad_() for shape in shapes]


def attention(options: dict[str, Any]) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        output: Tensor = F.scaled_dot_product_attention(query, key, value, mask, **options)
        return output

    return attend


class Attention(nn.Module):
    """A packed projection, heads in the middle of the memory order, causal attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.packed, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        packed = self.packed(x).view(batch, length, 3 * self.heads, dim // self.heads)
        query, key, value = packed.transpose(1, 2).chunk(3, 1)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: Tensor = self.out(output.transpose(1, 2).reshape(batch, length, dim))
        return found


# ------------------------------------------------------------------------------------ what is run


CASES: dict[str, tuple[dict[str, Any], Callable[[], Tensor] | None, dict[str, Any]]] = {
    "plain": ({}, None, {}),
    "causal": ({}, None, {"is_causal": True}),
    "scale": ({}, None, {"scale": 0.7}),
    "one_key_head": ({"kv_heads": 1}, None, {}),
    "lengths_and_dims": ({"lengths": (8, 24), "dims": (32, 16)}, None, {"is_causal": True}),
    "bool_mask": ({}, lambda: torch.rand(B, 1, S, S) > 0.3, {}),
    "key_mask": ({}, lambda: torch.tensor([[True] * (S - 2) + [False] * 2]), {}),
    "row_mask": ({}, lambda: torch.randn(H, 1, S).to(BF16), {}),
    "full_mask": ({}, lambda: torch.randn(B, H, S, S).to(BF16), {}),
}


@needs_thunder
@pytest.mark.parametrize("case", CASES)
def test_a_claimed_call_runs_our_operators(case: str, served: None) -> None:
    shapes, make_mask, options = CASES[case]
    tensors = leaves(**shapes)
    mask = None if make_mask is None else make_mask()
    attend = attention(options)
    exact = attend(
        *(t.float() for t in tensors),
        mask if mask is None or mask.dtype == torch.bool else mask.float(),
    )
    upstream = torch.randn_like(exact).to(BF16)
    want = torch.autograd.grad(exact, tensors, upstream.float())
    traced = jit(attend)
    output = traced(*tensors, mask)
    got = torch.autograd.grad(output, tensors, upstream)
    near(output, exact.to(BF16))
    for mine, theirs in zip(got, want, strict=True):
        near(mine, theirs)
    assert claimed(thunder.last_traces(traced)) == FORWARD
    assert claimed(thunder.last_backward_traces(traced)) == BACKWARD


@needs_thunder
def test_the_gradient_of_a_mask_is_computed_where_it_is_wanted(served: None) -> None:
    tensors = leaves()
    mask = torch.randn(1, H, S, S).to(BF16).requires_grad_()
    attend = attention({})
    exact = attend(*(t.float() for t in (*tensors, mask)))
    upstream = torch.randn_like(exact).to(BF16)
    want = torch.autograd.grad(exact, [*tensors, mask], upstream.float())
    traced = jit(attend)
    got = torch.autograd.grad(traced(*tensors, mask), [*tensors, mask], upstream)
    for mine, theirs in zip(got, want, strict=True):
        near(mine, theirs)
    ran = claimed(thunder.last_backward_traces(traced))
    assert sorted(ran) == ["cudnn_mha_sdpa_backward", "cudnn_mha_sdpa_mask_backward"]


@needs_thunder
def test_a_module_is_trained(on_h200: None) -> None:
    torch.manual_seed(0)
    model = Attention(64, 4).to(BF16)
    x = torch.randn(B, S, 64).to(BF16)
    traced = jit(model)
    output = traced(x)
    near(output, model(x))
    upstream = torch.randn_like(output)
    parameters = list(model.parameters())
    got = torch.autograd.grad(output, parameters, upstream)
    for mine, theirs in zip(got, torch.autograd.grad(model(x), parameters, upstream), strict=True):
        near(mine, theirs)
    assert claimed(thunder.last_traces(traced)) == FORWARD
    assert claimed(thunder.last_backward_traces(traced)) == BACKWARD


@needs_thunder
def test_without_a_gradient_there_is_no_log_sum_exp(served: None) -> None:
    tensors = leaves()
    traced = jit(attention({"is_causal": True}))
    with torch.no_grad():
        output = traced(*tensors)
    near(output, attention({"is_causal": True})(*tensors).detach())
    assert claimed(thunder.last_traces(traced)) == INFERENCE


@needs_thunder
def test_the_backward_drops_what_the_forward_dropped(served: None) -> None:
    query, key, _ = leaves()
    value = torch.eye(S).to(BF16).expand(B, H, S, S).contiguous().requires_grad_()
    traced = jit(attention({"dropout_p": 0.5}))
    weights = traced(query, key, value)
    dropped = weights == 0
    assert 0.3 < dropped.float().mean() < 0.7
    upstream = torch.randn_like(weights)
    (got,) = torch.autograd.grad(weights, value, upstream)
    near(got, weights.detach().mT @ upstream)


@needs_thunder
def test_two_calls_draw_two_masks(served: None) -> None:
    attend = attention({"dropout_p": 0.5})
    traced = jit(lambda *tensors: (attend(*tensors), attend(*tensors)))
    first, second = traced(*leaves())
    assert claimed(thunder.last_traces(traced)) == FORWARD * 2
    assert not torch.equal(first, second)
    assert {op.id for op in (integration._forward_op, integration._inference_op)} <= set(
        NON_FUNCTIONAL_OPS
    )


# -------------------------------------------------------------------------------- what is claimed


@needs_thunder
@pytest.mark.parametrize("gradient", [True, False])
def test_cpu_tensors_are_left_alone(gradient: bool) -> None:
    tensors = leaves()
    traced = jit(attention({"is_causal": True}))
    with torch.set_grad_enabled(gradient):
        output = traced(*tensors)
    near(output.detach(), attention({"is_causal": True})(*tensors).detach())
    assert claimed(thunder.last_traces(traced)) == []
    if gradient:
        output.sum().backward()
        assert claimed(thunder.last_backward_traces(traced)) == []


@needs_thunder
def test_tensors_must_be_on_one_gpu() -> None:
    cpu, first, second = (SimpleNamespace(device=Device(d)) for d in ("cpu", "cuda:0", "cuda:1"))
    assert integration._on_one_gpu(first, first, first)
    assert not integration._on_one_gpu(cpu, cpu, cpu)
    assert not integration._on_one_gpu(first, first, second)
    assert not integration._on_one_gpu(first, first, first, cpu)


def _randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


LEFT: dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]] = {
    "float32": lambda: ([_randn(B, H, S, D, dtype=torch.float32)] * 3, {}),
    "three_dimensions": lambda: ([_randn(H, S, D)] * 3, {}),
    "five_dimensions": lambda: ([_randn(B, B, H, S, D)] * 3, {}),
    "keys_of_one_batch": lambda: ([_randn(B, H, S, D), *[_randn(1, H, S, D)] * 2], {}),
    "one_query_head": lambda: ([_randn(B, 1, S, D), *[_randn(B, H, S, D)] * 2], {}),
    "no_backward": lambda: ([_randn(B, H, S, 512)] * 3, {}),
    "learnt_mask_and_dropout": lambda: (
        [*[_randn(B, H, S, D)] * 3, _randn(S, S)],
        {"dropout_p": 0.5},
    ),
}


@needs_thunder
@pytest.mark.parametrize("case", LEFT)
def test_what_cudnn_does_not_serve_is_left_to_others(case: str, on_h200: None) -> None:
    tensors, options = LEFT[case]()
    traced = jit(attention(options))
    output = traced(*tensors)
    assert claimed(thunder.last_traces(traced)) == []
    if not options:
        query, key, value = (t.double() for t in tensors[:3])
        scores = query @ key.mT * query.shape[-1] ** -0.5
        scores = scores + (tensors[3].double() if len(tensors) > 3 else 0)
        near(output.double(), scores.softmax(-1) @ value)


@needs_thunder
@pytest.mark.parametrize(("rule", "claims"), [("compiling", True), ("head_dim", False)])
def test_the_verdict_decides(
    rule: str, claims: bool, served: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def verdict(index: Any, *tensors: Any, **options: Any) -> Any:
        asked.append((*tensors, options))
        return SimpleNamespace(reasons=(Reason(rule, "because"),))

    monkeypatch.setattr(integration, "_explain", verdict)
    traced = jit(attention({"scale": 0.5, "dropout_p": 0.25}))
    traced(*leaves(kv_heads=1))
    assert bool(claimed(thunder.last_traces(traced))) == claims
    query, key, _, mask, *rest = asked[0]
    assert query.is_meta and query.dtype == BF16 and query.shape == (B, H, S, D)
    assert key.shape == (B, 1, S, D) and mask is None
    assert rest == [0.25, False, 0.5, {"enable_gqa": True, "requires_grad": True}]


@needs_thunder
def test_an_error_is_no_verdict(served: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("cuDNN fell over")

    monkeypatch.setattr(integration, "_explain", broken)
    with pytest.raises(RuntimeError, match="cuDNN fell over"):
        jit(attention({}))(*leaves())


@needs_thunder
def test_its_name_stands_for_it() -> None:
    assert thunder.get_executor("cudnn_mha") is integration.cudnn_mha_ex
    assert integration.cudnn_mha_ex not in thunder.get_default_executors()
    assert integration.cudnn_mha_ex.version == cudnn_mha.__version__


# ------------------------------------------------------------------------------- without Thunder


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("raise ModuleNotFoundError(name='thunder')", "needs Lightning Thunder: pip install"),
        ("raise AttributeError('no align_as')", "does not load with PyTorch .*: no align_as"),
    ],
)
def test_an_absent_or_broken_thunder_is_named(package: str, message: str, tmp_path: Any) -> None:
    (tmp_path / "thunder.py").write_text(package)
    code = f"""
import re, sys
sys.path.insert(0, {str(tmp_path)!r})
import cudnn_mha
cudnn_mha.cudnn_sdpa
assert "thunder" not in sys.modules
try:
    import cudnn_mha.integrations.thunder
except ImportError as error:
    assert re.search({message!r}, str(error)), error
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------- on the GPU


def runs() -> int:
    """How often plans were used, at the least once for each run."""
    return cudnn_mha.cache_info().hits


def by_thunder(case: Call, *, gradients: bool = True, **options: Any) -> Results:
    """The results of a traced function; all of it must be cuDNN's."""
    tensors = case.leaves()
    given = [*tensors[:3], tensors[3] if len(tensors) > 3 else case.mask]
    wanted = {k: v for k, v in case.options.items() if k != "enable_gqa"}
    traced = thunder.jit(
        attention(wanted), executors=[integration.cudnn_mha_ex, *thunder.get_default_executors()]
    )
    with torch.set_grad_enabled(gradients):
        output = traced(*given)
        before = runs()
        output = traced(*given)
    results = {"output": output.detach()}
    learnt = len(tensors) > 3
    if gradients:
        found = torch.autograd.grad(output, tensors, case.grad_output)
        results |= dict(zip(NAMES, found, strict=False))
        ran = claimed(thunder.last_backward_traces(traced))
        assert sorted(ran) == BACKWARD + ["cudnn_mha_sdpa_mask_backward"] * learnt
    assert claimed(thunder.last_traces(traced)) == (FORWARD if gradients else INFERENCE)
    assert runs() - before >= (2 + learnt if gradients else 1)
    assert dispatch._logged == set()
    return results


GPU_CASES: dict[str, Callable[[], Call]] = {
    "plain": lambda: call(),
    "causal_fp16": lambda: call(dtype=FP16, is_causal=True),
    "scale": lambda: call(scale=0.2),
    "one_key_head": lambda: call(heads=(4, 1, 1)),
    "lengths_and_dims": lambda: call(lengths=(64, 704), dims=(128, 64)),
    "mask": lambda: call(mask=torch.rand(2, 1, 200, 200, device="cuda") > 0.2),
    "learnt_mask": lambda: call(mask=randn(1, 4, 200, 200).requires_grad_()),
    "bshd": lambda: Call(*(randn(2, 200, 4, 64).transpose(1, 2) for _ in range(3))),
}


@needs_thunder
@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_gpu_values(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(dispatch, "_logged", set())
    assert_right(GPU_CASES[case](), results=by_thunder)
    assert_right(GPU_CASES[case](), gradients=False, results=by_thunder)


@needs_thunder
@pytest.mark.gpu
def test_gpu_a_module_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    torch.manual_seed(0)
    model = Attention(256, 4).cuda().to(BF16)
    x = torch.randn(2, 200, 256, device="cuda").to(BF16)
    traced = thunder.jit(
        model, executors=[integration.cudnn_mha_ex, *thunder.get_default_executors()]
    )
    output = traced(x)
    upstream = torch.randn_like(output)
    parameters = list(model.parameters())
    got = torch.autograd.grad(output, parameters, upstream)
    want = torch.autograd.grad(model(x), parameters, upstream)
    near(output.detach(), model(x).detach(), 0.02)  # both in bfloat16
    for mine, theirs in zip(got, want, strict=True):
        near(mine, theirs, 0.02)
    assert claimed(thunder.last_traces(traced)) == FORWARD
    assert claimed(thunder.last_backward_traces(traced)) == BACKWARD
    assert dispatch._logged == set()
