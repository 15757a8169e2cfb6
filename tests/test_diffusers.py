"""cuDNN attention as a backend of diffusers: names, values, what is undone, what is refused."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cudnn_mha
from cudnn_mha import dispatch as decisions
from tests.oracle import NAMES, Call, Results, assert_right
from tests.test_gpu_values import BF16, FP16, randn

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed", allow_module_level=True)

import diffusers
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

from cudnn_mha.integrations import diffusers as integration

Registry: Any = attention_dispatch._AttentionBackendRegistry
Model = Callable[[], tuple[Any, dict[str, Any]]]

B, S, H, D = 2, 10, 4, 16


@dataclass
class Spy:
    """`cudnn_sdpa`, noting the tensors of its calls."""

    queries: list[Tensor] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, query: Tensor, *args: Any, **options: Any) -> Any:
        self.queries.append(query)
        self.options.append(options)
        return cudnn_mha.cudnn_sdpa(query, *args, **options)


@pytest.fixture
def registered() -> Iterator[Any]:
    integration.register()
    yield AttentionBackendName("cudnn_mha")
    integration.unregister()


@pytest.fixture
def spy(registered: Any, monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()
    monkeypatch.setattr(integration, "cudnn_sdpa", spy)
    return spy


def state() -> tuple[Any, ...]:
    """All that registering changes, in copies."""
    names = AttentionBackendName
    return (
        list(vars(names)),
        list(names._member_names_),
        dict(names._member_map_),
        dict(names._value2member_map_),
        dict(Registry._backends),
        copy.deepcopy(Registry._constraints),
        copy.deepcopy(Registry._supported_arg_names),
        set(Registry._supports_context_parallel),
        Registry._active_backend,
    )


def flux() -> tuple[Any, dict[str, Any]]:
    """A small Flux, whose two kinds of blocks call attention once each."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(2, 16, 4, requires_grad=True),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.5, 0.7]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }
    return model, inputs


def qwen_image() -> tuple[Any, dict[str, Any]]:
    """A small Qwen-Image of two blocks, which masks the padding of the text."""
    torch.manual_seed(0)
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    inputs = {
        "hidden_states": torch.randn(2, 16, 16, requires_grad=True),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
        "timestep": torch.tensor([0.5, 0.7]),
        "img_shapes": [(1, 4, 4)] * 2,
    }
    return model, inputs


MODELS: dict[str, Model] = {"flux": flux, "qwen_image": qwen_image}


def trained(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter that has one."""
    leaves = [inputs["hidden_states"], *model.parameters()]
    output = model(**inputs).sample
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    found = torch.autograd.grad((output * weights).sum(), leaves, allow_unused=True)
    return [output.detach(), *(grad for grad in found if grad is not None)]


def equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) > 1
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("model", MODELS)
def test_a_model_gives_what_the_native_backend_gives(model: str, spy: Spy) -> None:
    net, inputs = MODELS[model]()
    want = trained(net, inputs)
    assert spy.queries == []
    net.set_attention_backend("cudnn_mha")
    equal(trained(net, inputs), want)
    assert len(spy.queries) == 2
    net.set_attention_backend("native")
    equal(trained(net, inputs), want)
    assert len(spy.queries) == 2


def test_the_context_manager_sets_and_restores(spy: Spy) -> None:
    net, inputs = flux()
    want = trained(net, inputs)
    before = Registry._active_backend
    with diffusers.attention_backend("cudnn_mha"):
        equal(trained(net, inputs), want)
    assert len(spy.queries) == 2
    assert Registry._active_backend is before


def test_a_unet_does_not_come_by(spy: Spy) -> None:
    # Its processors call PyTorch's function, which the drop-in serves.
    net, inputs = unet()
    want = net(**inputs).sample
    net.set_attention_backend("cudnn_mha")
    torch.testing.assert_close(net(**inputs).sample, want)
    assert spy.queries == []


def unet() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor(7),
        "encoder_hidden_states": torch.randn(2, 9, 32),
    }
    return model, inputs


# -------------------------------------------------------------------------------------- arguments


def tensors(kv_heads: int = H, keys: int = S) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((B, S, H, D), (B, keys, kv_heads, D), (B, keys, kv_heads, D))
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def attended(backend: Any, leaves: list[Tensor], **options: Any) -> list[Tensor]:
    torch.manual_seed(1)  # for dropout
    output = dispatch_attention_fn(*leaves, backend=backend, **options)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def key_mask() -> Tensor:
    return torch.arange(S).expand(B, S) < torch.tensor([[S - 3], [S]])


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "scale": ({}, {"scale": 0.7}),
    "grouped": ({"kv_heads": 2}, {"enable_gqa": True}),
    "grouped_causal": ({"kv_heads": 1, "keys": 14}, {"enable_gqa": True, "is_causal": True}),
    "key_mask": ({}, {"attn_mask": key_mask()}),
    "additive_key_mask": ({}, {"attn_mask": torch.where(key_mask(), 0.5, -torch.inf)}),
    "square_mask": ({}, {"attn_mask": torch.rand(S, S) > 0.3}),
    "full_mask": ({}, {"attn_mask": torch.randn(B, H, S, S)}),
    "dropout": ({}, {"dropout_p": 0.3}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_argument_means_what_it_means_to_the_native_backend(case: str, spy: Spy) -> None:
    shapes, options = CASES[case]
    leaves = tensors(**shapes)
    want = attended("native", leaves, **options)
    assert spy.queries == []
    equal(attended("cudnn_mha", leaves, **options), want)
    assert len(spy.queries) == 1


def test_tensors_go_in_as_views(spy: Spy) -> None:
    query = torch.randn(B, S, 3, H, D)[:, :, 0]  # a slice of a packed projection
    dispatch_attention_fn(query, query, query, backend="cudnn_mha")
    (seen,) = spy.queries
    assert seen.data_ptr() == query.data_ptr()
    assert seen.shape == (B, H, S, D)
    assert seen.stride() == query.transpose(1, 2).stride()


def test_the_log_sum_exp_comes_in_the_layout_of_diffusers(registered: Any) -> None:
    query, key, value = tensors(keys=14)
    options = {"backend": registered, "attention_kwargs": {"return_lse": True}}
    output, lse = dispatch_attention_fn(query, key, value, **options)
    assert output.shape == (B, S, H, D)
    assert lse.shape == (B, S, H) and lse.dtype == torch.float32
    scores = torch.einsum("bqhd,bkhd->bqhk", query, key) * D**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    alone = dispatch_attention_fn(query, key, value, backend=registered)
    torch.testing.assert_close(output, alone)


def test_context_parallelism_is_refused(registered: Any) -> None:
    query, key, value = tensors()
    with pytest.raises(ValueError, match=r"'cudnn_mha'.*_parallel_config"):
        dispatch_attention_fn(query, key, value, backend=registered, parallel_config=object())
    net, _ = flux()
    net.transformer_blocks[0].attn.processor._parallel_config = object()
    with pytest.raises(ValueError, match="'cudnn_mha' does not support context parallelism"):
        net.set_attention_backend("cudnn_mha")


def test_the_checks_of_diffusers_hold(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "_checks_enabled", True)
    query, key, value = tensors()
    with pytest.raises(ValueError, match="must match the key's sequence length"):
        dispatch_attention_fn(query, key, value, torch.ones(S, S + 1), backend=registered)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiler_goes_through_without_a_break(registered: Any) -> None:
    torch._dynamo.reset()
    leaves = tensors()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return dispatch_attention_fn(query, key, value, is_causal=True, backend=registered)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), attend(*leaves))
    torch._dynamo.reset()


# -------------------------------------------------------------------------- registered and not


def test_unregister_leaves_no_trace() -> None:
    before = state()
    integration.register()
    once = state()
    integration.register()
    assert state() == once != before
    integration.unregister()
    assert state() == before
    assert not hasattr(AttentionBackendName, "CUDNN_MHA")
    integration.unregister()
    assert state() == before
    with (
        pytest.raises(ValueError, match="not registered"),
        diffusers.attention_backend("cudnn_mha"),
    ):
        raise AssertionError
    with pytest.raises(ValueError, match="cudnn_mha"):
        AttentionBackendName("cudnn_mha")


def test_unregister_puts_the_active_backend_back() -> None:
    before = state()
    integration.register()
    net, _ = flux()
    net.set_attention_backend("cudnn_mha")
    assert Registry._active_backend is AttentionBackendName("cudnn_mha")
    integration.unregister()
    assert state() == before


def test_the_member_is_one_of_the_names(registered: Any) -> None:
    assert registered is AttentionBackendName.CUDNN_MHA is AttentionBackendName["CUDNN_MHA"]
    assert list(AttentionBackendName)[-1] is registered
    assert registered == registered.value == "cudnn_mha"
    assert copy.deepcopy(registered) is registered
    assert registered in Registry.list_backends()


def test_the_environment_may_name_it() -> None:
    code = """
from cudnn_mha.integrations import diffusers as integration
integration.register()
import torch
from diffusers.models.attention_dispatch import (
    _AttentionBackendRegistry as Registry, AttentionBackendName, dispatch_attention_fn
)
assert Registry._active_backend is AttentionBackendName.CUDNN_MHA
calls = []
real = integration.cudnn_sdpa
integration.cudnn_sdpa = lambda *args, **options: calls.append(1) or real(*args, **options)
query = torch.randn(1, 3, 2, 8)
dispatch_attention_fn(query, query, query)
assert calls == [1]
integration.unregister()
assert Registry._active_backend is AttentionBackendName.NATIVE
dispatch_attention_fn(query, query, query)
assert calls == [1]
"""
    run(code, DIFFUSERS_ATTN_BACKEND="cudnn_mha")


def test_the_package_does_not_load_diffusers_nor_need_it() -> None:
    run("""
import sys
import cudnn_mha
cudnn_mha.cudnn_sdpa
assert "diffusers" not in sys.modules
sys.modules["diffusers"] = None
try:
    import cudnn_mha.integrations.diffusers
except ImportError as error:
    assert "pip install 'diffusers" in str(error)
else:
    raise AssertionError
""")


def run(code: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------ unknown releases


def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "__version__", "0.35.2")


def without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Registry, "_supported_arg_names")


def without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention_dispatch, "_check_shape")


def without_an_active_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "_active_backend", "native")


def another_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "register", lambda name, checks: None)


def another_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention_dispatch, "AttentionBackendName", SimpleNamespace(NATIVE="native")
    )


def another_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    native = AttentionBackendName.NATIVE
    arguments = {*Registry._supported_arg_names[native], "window"}
    monkeypatch.setitem(Registry._supported_arg_names, native, arguments)


def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    native = AttentionBackendName.NATIVE
    monkeypatch.setitem(AttentionBackendName._value2member_map_, "cudnn_mha", native)


UNKNOWN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "old": (old, r"0\.35\.2: it is older than 0\.42\.0; pip install 'diffusers>=0\.42\.0'"),
    "without_a_table": (without_a_table, "_supported_arg_names is not a dictionary"),
    "without_a_check": (without_a_check, "_check_shape is missing"),
    "without_an_active_name": (without_an_active_name, "_active_backend is not one of"),
    "another_decorator": (another_decorator, "register takes other arguments"),
    "another_enumeration": (another_enumeration, "AttentionBackendName is not an enumeration"),
    "another_argument": (another_argument, "take other arguments: window"),
    "taken": (taken, "has a backend called 'cudnn_mha' already"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_dispatcher_is_refused_and_left_alone(case: str) -> None:
    change, message = UNKNOWN[case]
    before = state()
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        with pytest.raises(RuntimeError, match=message) as caught:
            integration.register()
        assert "cudnn_mha.enable()" in str(caught.value)
    assert state() == before


# -------------------------------------------------------------------------------------- on the GPU


def runs() -> int:
    """How often plans were used, at the least once for each run."""
    return cudnn_mha.cache_info().hits


def by_diffusers(case: Call, *, gradients: bool = True, **options: Any) -> Results:
    """The results through diffusers' dispatcher; all of it must be cuDNN's."""
    leaves = case.leaves()
    given = {key: case.options[key] for key in case.options if key != "deterministic"}
    before = runs()
    with torch.set_grad_enabled(gradients):
        output, lse = dispatch_attention_fn(
            *(leaf.transpose(1, 2) for leaf in leaves[:3]),
            attn_mask=case.mask,
            attention_kwargs={"return_lse": True},
            backend="cudnn_mha",
            **given,
        )
    assert output.is_contiguous()
    results = {"output": output.transpose(1, 2).detach(), "lse": lse.transpose(1, 2).detach()}
    if gradients:
        found = torch.autograd.grad(output.transpose(1, 2), leaves, case.grad_output)
        results |= dict(zip(NAMES, found, strict=False))
    assert runs() - before >= (2 if gradients else 1)
    assert decisions._logged == set()
    return results


def bshd(kv_heads: int = H, dtype: torch.dtype = BF16) -> list[Tensor]:
    shapes = ((B, 200, H, 64), (B, 300, kv_heads, 64), (B, 300, kv_heads, 64))
    return [randn(*shape, dtype=dtype).transpose(1, 2) for shape in shapes]


GPU_CASES: dict[str, Callable[[], Call]] = {
    "plain": lambda: Call(*bshd()),
    "fp16": lambda: Call(*bshd(dtype=FP16)),
    "causal": lambda: Call(*bshd(), options={"is_causal": True}),
    "scale": lambda: Call(*bshd(), options={"scale": 0.2}),
    "grouped": lambda: Call(*bshd(2), options={"enable_gqa": True, "is_causal": True}),
    "mask": lambda: Call(*bshd(), torch.rand(B, 1, 200, 300, device="cuda") > 0.2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_gpu_values(case: str, registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(decisions, "_logged", set())
    assert_right(GPU_CASES[case](), results=by_diffusers)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_gpu_models_run_on_plans(
    model: str, registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "_logged", set())
    net, inputs = MODELS[model]()
    inputs = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    leaf = inputs["hidden_states"].detach()

    def step(dtype: torch.dtype) -> list[Tensor]:
        net.to(dtype)
        cast = {
            k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in inputs.items()
        }
        cast["hidden_states"] = leaf.to(dtype).requires_grad_()
        return [found.float() for found in trained(net, cast)]

    net.cuda().to(BF16).float()  # so that all start from the same weights
    want = step(torch.float32)
    with sdpa_kernel(SDPBackend.MATH):
        peer = step(BF16)
    net.set_attention_backend("cudnn_mha")
    before = runs()
    got = step(BF16)
    assert runs() - before >= 4  # two calls, forward and backward
    assert decisions._logged == set()
    # The output, then all gradients as one: those of single parameters may be next to nothing.
    for part in (slice(0, 1), slice(1, None)):
        exact, mine, theirs = (torch.cat([t.flatten() for t in f[part]]) for f in (want, got, peer))
        error, allowed = ((t - exact).norm().item() for t in (mine, theirs))
        assert error <= 1.5 * allowed + 2e-3 * exact.norm().item()


@pytest.mark.gpu
def test_gpu_a_unet_runs_on_the_drop_in() -> None:
    net, inputs = unet()
    net.cuda().to(BF16)
    given = {k: v.cuda() for k, v in inputs.items()}
    given |= {k: given[k].to(BF16) for k in ("sample", "encoder_hidden_states")}
    with torch.no_grad(), cudnn_mha.enabled():
        served = cudnn_mha.status().served
        got = net(**given).sample
        assert cudnn_mha.status().served > served
    with torch.no_grad():
        want = net.float()(**{k: v.float() for k, v in given.items()}).sample
    assert (got.float() - want).norm() <= 0.03 * want.norm()
