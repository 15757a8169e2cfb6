"""PyTorch's own function on our plans: values, conventions, choice, compilers, graphs, threads."""

from __future__ import annotations

import logging
import math
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import cudnn_mha
from cudnn_mha import backend, config, cudnn_sdpa, dispatch, reference
from tests.oracle import NAMES, Call, Results, assert_right, failures
from tests.test_gpu_values import BF16, FP16, FP32, call, call_with_gradient, randn

pytestmark = pytest.mark.gpu

CUDNN = SDPBackend.CUDNN_ATTENTION
STRESS_SECONDS = float(os.environ.get("CUDNN_MHA_STRESS_SECONDS", "4"))
OP = torch.ops.aten._scaled_dot_product_cudnn_attention


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(dispatch, "_logged", set())
    with cudnn_mha.enabled():
        yield
    torch.use_deterministic_algorithms(False)


def counts() -> tuple[int, int, int]:
    now = cudnn_mha.status()
    return now.served, now.served_backward, now.fallbacks


def counted(before: tuple[int, int, int]) -> tuple[int, int, int]:
    """Forward calls, backward calls and fallbacks since then."""
    return tuple(b - a for a, b in zip(before, counts(), strict=True))  # type: ignore[return-value]


def dropin(case: Call, *, gradients: bool = True, **options: Any) -> Results:
    """Output and gradients by `F.scaled_dot_product_attention`; all of it must be ours."""
    leaves = case.leaves()
    before = counts()
    with torch.set_grad_enabled(gradients), sdpa_kernel(CUDNN):
        output = F.scaled_dot_product_attention(*leaves[:3], case.mask, **case.options, **options)
    results = {"output": output.detach()}
    if gradients:
        found = torch.autograd.grad(output, leaves, case.grad_output)
        results |= dict(zip(NAMES, found, strict=False))
    assert counted(before) == (1, int(gradients), 0)
    return results


# ------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "lengths", [(128, 128), (1, 1000), (1, 64), (63, 65), (64, 704), (777, 333)], ids=str
)
def test_lengths(lengths: tuple[int, int], dtype: torch.dtype, causal: bool) -> None:
    assert_right(call(lengths=lengths, dtype=dtype, is_causal=causal), results=dropin)


@pytest.mark.parametrize("dims", [(8, 8), (128, 128), (128, 64), (64, 128), (96, 40)], ids=str)
@pytest.mark.parametrize("heads", [(8, 8, 8), (8, 2, 2), (8, 1, 1)], ids=str)
def test_head_dims_and_groups(dims: tuple[int, int], heads: tuple[int, int, int]) -> None:
    assert_right(call(dims=dims, heads=heads, is_causal=True), results=dropin)


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_scale(scale: float) -> None:
    assert_right(call(scale=scale), results=dropin)


def bshd(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def gapped(tensor: Tensor) -> Tensor:
    return F.pad(tensor, (0, 8))[..., :-8]


def unaligned(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bshd": bshd,
    "gapped": gapped,
    "unaligned": unaligned,  # of which PyTorch's own kernel makes garbage
    "one_batch_repeated": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    case = call(heads=(8, 2, 2))
    tensors = (LAYOUTS[layout](t) for t in (case.query, case.key, case.value))
    assert_right(Call(*tensors, options=case.options), results=dropin)


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda keep: keep,
    "float32": lambda keep: torch.zeros_like(keep, dtype=FP32).masked_fill(~keep, -math.inf),
    "bfloat16": lambda keep: torch.zeros_like(keep, dtype=BF16).masked_fill(~keep, -math.inf),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", [(2, 4, 200, 333), (2, 1, 1, 333), (200, 333), (1, 4, 200, 333)])
def test_masks_with_rows_that_attend_to_nothing(kind: str, shape: tuple[int, ...]) -> None:
    keep = torch.rand(shape, device="cuda") > 0.3
    keep[..., 0, :] = False
    assert_right(call(lengths=(200, 333), mask=MASKS[kind](keep)), results=dropin)


@pytest.mark.parametrize("low", [-1e9, "lowest"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rows_of_very_low_mask_values(low: float | str, dtype: torch.dtype) -> None:
    fill = torch.finfo(dtype).min if low == "lowest" else float(low)
    keep = torch.rand(2, 1, 200, 192, device="cuda") > 0.3
    keep[:, :, :3] = False
    mask = torch.zeros(keep.shape, device="cuda", dtype=dtype).masked_fill(~keep, fill)
    case = call(lengths=(200, 192), mask=mask)
    case.exact_mask = mask.double() - mask.double().amax(-1, keepdim=True)
    assert failures(case, results=dropin) == []


@pytest.mark.parametrize("mode", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("lengths", [(1, 64), (1, 128), (64, 64), (200, 704)], ids=str)
def test_very_low_scores(lengths: tuple[int, int], mode: str) -> None:
    """Where PyTorch's own kernels give NaN."""
    mask = None
    if mode == "bool":
        mask = torch.ones(lengths, dtype=torch.bool, device="cuda")
    elif mode == "float":
        mask = torch.zeros(lengths, device="cuda")
    case = call(lengths=lengths, mask=mask, is_causal=mode == "causal")
    case.query[..., 0] = 1
    case.key[..., 0] = -120 * 64**0.5
    assert_right(case, results=dropin)


# ------------------------------------------------------------------------------------- conventions


def described(results: Any, *, strides: bool = True) -> list[Any]:
    return [
        (r.shape, r.dtype, r.device, r.stride() if strides else None)
        if isinstance(r, Tensor)
        else r
        for r in results
    ]


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("dim_v", [64, 128])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)], ids=str)
def test_results_are_laid_out_as_pytorchs(order: tuple[int, ...], dim_v: int, lse: bool) -> None:
    back = [order.index(dim) for dim in range(4)]
    query, key, value = (
        randn(*(shape[dim] for dim in order)).permute(back)
        for shape in ((2, 3, 136, 64), (2, 3, 200, 64), (2, 3, 200, dim_v))
    )
    ours = OP(query, key, value, None, lse)
    meta = OP(*(t.to("meta") for t in (query, key, value)), None, lse)
    cudnn_mha.disable()
    theirs = OP(query, key, value, None, lse)
    cudnn_mha.enable()
    # What PyTorch tells compilers and what it does are not one layout where Dv is not Dqk.
    same = dim_v == 64
    assert described(ours, strides=same) == described(theirs, strides=same)
    assert ours[0].stride() == meta[0].stride()
    assert (ours[0].double() - theirs[0].double()).norm() < 0.01 * theirs[0].double().norm()
    if lse:
        assert (ours[1] - theirs[1]).abs().max() < 2e-3
        grad_output = randn(*ours[0].shape)
        arguments = (grad_output, query, key, value, *ours[:2], *ours[6:8], None, None, None)
        rest = (136, 200, 0.0, False)
        got = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*arguments, *rest)
        cudnn_mha.disable()
        want = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*arguments, *rest)
        cudnn_mha.enable()
        assert described(got) == described(want)
        for a, b in zip(got, want, strict=True):
            assert (a.double() - b.double()).norm() < 0.02 * b.double().norm()


def test_stashed_parts_may_have_any_layout() -> None:
    """Context parallelism hands over chunks of output, log-sum-exp and gradient."""
    query, key, value = (randn(2, 4, 256, 64) for _ in range(3))
    output, lse, *_, seed, offset, _ = OP(query, key, value, None, True)
    grad_output = randn(2, 4, 256, 64)
    half = slice(128, 256)
    rest = (seed, offset, None, None, None, 128, 256, 0.0, False)
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    before = counts()
    got = backward(
        grad_output[:, :, half],
        query[:, :, half],
        key,
        value,
        output[:, :, half],
        lse[:, :, half],
        *rest,
    )
    assert counted(before) == (0, 1, 0)
    leaves = [t.double().requires_grad_() for t in (query[:, :, half], key, value)]
    exact, _ = reference.attention(*leaves, compute_dtype=torch.float64)
    want = torch.autograd.grad(exact, leaves, grad_output[:, :, half].double())
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() < 0.01 * b.norm()


def test_disable_puts_pytorchs_kernel_back() -> None:
    query = randn(2, 4, 200, 64)
    cudnn_mha.disable()
    with sdpa_kernel(CUDNN):
        want = F.scaled_dot_product_attention(query, query, query)
    cudnn_mha.enable()
    dropin(Call(query, query, query), gradients=False)
    cudnn_mha.disable()
    before = counts()
    with sdpa_kernel(CUDNN):
        again = F.scaled_dot_product_attention(query, query, query)
    assert counted(before) == (0, 0, 0)
    assert torch.equal(again, want)


def weights(p: float, between: Callable[[], None] = lambda: None) -> tuple[Tensor, Tensor]:
    """The weights over 128 keys that the forward and the backward really use."""
    query = torch.zeros(4, 8, 128, 128, device="cuda", dtype=FP16)
    key = randn(4, 8, 128, 128, dtype=FP16)
    eye = torch.eye(128, device="cuda", dtype=FP16).expand(4, 8, 128, 128).contiguous()
    value = eye.clone().requires_grad_()
    with sdpa_kernel(CUDNN):
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=p)
    between()
    (grad,) = torch.autograd.grad(output, value, eye)
    return output.detach(), grad.transpose(-1, -2)


def test_dropout() -> None:
    before = counts()
    torch.manual_seed(5)
    forward, backward = weights(0.25)
    assert counted(before) == (1, 1, 0)
    assert torch.equal(forward == 0, backward == 0)
    assert abs((forward == 0).double().mean().item() - 0.25) < 0.005
    torch.manual_seed(5)
    assert torch.equal(weights(0.25)[0], forward)
    assert not torch.equal(weights(0.25)[0], forward)


def test_pytorchs_backward_drops_what_our_forward_dropped() -> None:
    forward, backward = weights(0.25, between=cudnn_mha.disable)
    assert torch.equal(forward == 0, backward == 0)


def test_double_backward_is_pytorchs_error() -> None:
    query = randn(1, 2, 64, 64).requires_grad_()
    with sdpa_kernel(CUDNN):
        output = F.scaled_dot_product_attention(query, query, query)
    (grad,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


# ------------------------------------------------------------------------------------------ choice


def test_enabled_is_preferred_and_keeps_the_other_backends() -> None:
    query = randn(2, 4, 64, 64)
    before = counts()
    F.scaled_dot_product_attention(query, query, query)
    assert counted(before) == (1, 0, 0)
    single = randn(2, 4, 1, 64)  # PyTorch's choice never takes cuDNN for one key
    F.scaled_dot_product_attention(single, single, single)
    assert counted(before) == (1, 0, 0)


@pytest.mark.parametrize("backends", [SDPBackend.FLASH_ATTENTION, [SDPBackend.MATH]], ids=str)
def test_a_context_without_cudnn_keeps_us_out(backends: Any) -> None:
    query = randn(2, 4, 64, 64)
    before = counts()
    with sdpa_kernel(backends):
        F.scaled_dot_product_attention(query, query, query)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        F.scaled_dot_product_attention(query, query, query)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert counted(before) == (0, 0, 0)


def test_the_order_of_preference_is_honoured() -> None:
    query = randn(2, 4, 64, 64)
    before = counts()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, CUDNN], set_priority=True):
        F.scaled_dot_product_attention(query, query, query)
    assert counted(before) == (0, 0, 0)
    with sdpa_kernel([CUDNN, SDPBackend.FLASH_ATTENTION], set_priority=True):
        F.scaled_dot_product_attention(query, query, query)
    assert counted(before) == (1, 0, 0)
    assert cudnn_mha.status().priority[0] == "CUDNN_ATTENTION"


def test_what_we_refuse_goes_to_pytorchs_cudnn_and_is_explained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(config.WORKSPACE_LIMIT, "0")
    config.reload()
    cudnn_mha.cache_clear()
    case = call_with_gradient(call(lengths=(256, 256)))
    leaves = case.leaves()
    before = counts()
    try:
        with caplog.at_level(logging.WARNING, "cudnn_mha"), sdpa_kernel(CUDNN):
            output = F.scaled_dot_product_attention(*leaves)
        got = torch.autograd.grad(output, leaves, case.grad_output)
    finally:
        monkeypatch.undo()
        config.reload()
        cudnn_mha.cache_clear()
    assert counted(before) == (0, 0, 2)
    assert cudnn_mha.status().reasons["workspace_limit"] >= 2
    assert "workspace_limit = 0" in caplog.text
    want = dropin(case)
    for name, value in zip(NAMES, got, strict=False):
        assert (value.double() - want[name].double()).norm() < 0.02 * want[name].double().norm()


def test_only_cudnn_and_no_cudnn_for_it_is_pytorchs_error() -> None:
    query = randn(1, 2, 64, 264).requires_grad_()
    with warnings.catch_warnings(), sdpa_kernel(CUDNN):
        warnings.simplefilter("ignore")  # PyTorch's reasons
        with pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(query, query, query)
    assert cudnn_mha.status().enabled


def test_determinism_with_warnings_only() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    case = call_with_gradient(call(heads=(16, 16, 16), lengths=(512, 512), batch=8))
    runs = [dropin(case) for _ in range(4)]
    for other in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(value, other[name]), name


# -------------------------------------------------------------------------- what is built on top


def test_autocast() -> None:
    query, key, value = (torch.randn(2, 4, 128, 64, device="cuda") for _ in range(3))
    before = counts()
    with torch.autocast("cuda", BF16):
        output = F.scaled_dot_product_attention(query, key, value)
    assert counted(before) == (1, 0, 0) and output.dtype == BF16
    want, _ = reference.attention(query, key, value, compute_dtype=torch.float64)
    assert (output.double() - want).norm() < 0.01 * want.norm()


def test_vmap() -> None:
    query, key, value = (randn(3, 2, 4, 96, 64) for _ in range(3))
    got = torch.vmap(F.scaled_dot_product_attention)(query, key, value)
    want, _ = reference.attention(query, key, value, compute_dtype=torch.float64)
    assert (got.double() - want).norm() < 0.01 * want.norm()


def test_checkpointing_takes_the_same_decision_again() -> None:
    case = call_with_gradient(call(is_causal=True))
    leaves = case.leaves()

    def layer(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=True)

    before = counts()
    output = checkpoint(layer, *leaves, use_reentrant=False)
    got = torch.autograd.grad(output, leaves, case.grad_output)
    assert counted(before) == (2, 1, 0)
    want = dropin(case)
    for name, value in zip(NAMES, got, strict=False):
        assert (value.double() - want[name].double()).norm() < 1e-3 * want[name].double().norm()


def block(x: Tensor, weight: Tensor) -> Tensor:
    """Self-attention as models write it: one projection, heads taken apart by views."""
    batch, length, _ = x.shape
    qkv = (x @ weight).view(batch, length, 3, 4, 64).permute(2, 0, 3, 1, 4)
    output = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
    return output.transpose(1, 2).reshape(batch, length, 256)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_blocks(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    weight = (randn(256, 768) / 16).requires_grad_()
    for length in (192, 328) if dynamic else (192,):
        x = randn(2, length, 256).requires_grad_()
        grad = randn(2, length, 256)
        before = counts()
        got = torch.autograd.grad(compiled(x, weight), (x, weight), grad)
        assert counted(before) == (1, 1, 0)
        want = torch.autograd.grad(block(x, weight), (x, weight), grad)
        for a, b in zip(got, want, strict=True):
            assert (a.double() - b.double()).norm() < 0.02 * b.double().norm()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # PyTorch's own first one
def test_compiled_with_cuda_graphs() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    weight = randn(256, 768) / 16
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            x = randn(2, 160, 256)
            got, want = compiled(x, weight).clone(), block(x, weight)
            assert (got.double() - want.double()).norm() < 0.01 * want.double().norm()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_captured_forward_and_backward() -> None:
    case = call_with_gradient(call(is_causal=True))
    leaves = case.leaves()

    def run() -> tuple[Tensor, ...]:
        with sdpa_kernel(CUDNN):
            output = F.scaled_dot_product_attention(*leaves, is_causal=True)
        return (output, *torch.autograd.grad(output, leaves, case.grad_output))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for leaf in leaves:
        leaf.data.mul_(0.5)
    graph.replay()
    for replayed, again in zip(captured, run(), strict=True):
        assert (replayed.double() - again.double()).norm() <= 1e-3 * again.double().norm()


def test_a_captured_graph_drops_anew_at_each_replay() -> None:
    query = torch.zeros(8, 16, 128, 128, device="cuda", dtype=FP16)
    value = torch.eye(128, device="cuda", dtype=FP16).expand(8, 16, 128, 128).contiguous()

    def run() -> Tensor:
        with sdpa_kernel(CUDNN):
            return F.scaled_dot_product_attention(query, query, value, dropout_p=0.25)

    run()
    graph = torch.cuda.CUDAGraph()
    before = counts()
    with torch.cuda.graph(graph):
        output = run()
    assert counted(before) == (1, 0, 0)
    draws = []
    for _ in range(2):
        graph.replay()
        draws.append((output == 0).clone())
    differ = (draws[0] != draws[1]).double().mean().item()
    assert abs(differ - 2 * 0.25 * 0.75) < 0.01


# -------------------------------------------------------------------------- threads and processes


def random_case(rng: random.Random) -> Call:
    length = rng.choice([1, 33, 64, 128, 200])
    heads = rng.choice([(4, 4, 4), (4, 2, 2)])
    mask = None
    if rng.random() < 0.4:
        mask = torch.rand(length, 192, device="cuda") > 0.2
    dims = rng.choice([(64, 64), (128, 128), (64, 128)])
    case = call(heads=heads, lengths=(length, 192), dims=dims, mask=mask)
    if mask is None:
        case.options["is_causal"] = rng.random() < 0.5
    return call_with_gradient(case)


def results_of(case: Call, *, through_pytorch: bool) -> Results:
    leaves = case.leaves()
    attend: Any = F.scaled_dot_product_attention if through_pytorch else cudnn_sdpa
    output = attend(*leaves, case.mask, **case.options)
    found = torch.autograd.grad(output, leaves, case.grad_output)
    return {"output": output.detach(), **dict(zip(NAMES, found, strict=False))}


def test_stress_of_threads_streams_and_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads, each on streams of its own, while plans are dropped under their feet."""
    from cudnn_mha.cache import plans

    monkeypatch.setattr(plans, "_maxsize", 12)
    rng = random.Random(0)
    cases = [random_case(rng) for _ in range(16)]
    wanted = [results_of(case, through_pytorch=True) for case in cases]
    torch.cuda.synchronize()
    wrong: list[str] = []
    calls = [0] * 8
    deadline = time.monotonic() + STRESS_SECONDS

    def work(number: int) -> None:
        own = random.Random(number)
        streams = [torch.cuda.Stream() for _ in range(2)]
        try:
            while time.monotonic() < deadline and not wrong:
                i = own.randrange(len(cases))
                with torch.cuda.stream(own.choice(streams)):
                    got = results_of(cases[i], through_pytorch=own.random() < 0.5)
                    torch.cuda.current_stream().synchronize()
                for name, value in got.items():
                    want = wanted[i][name].double()
                    if not (value.double() - want).norm() <= 4e-3 * want.norm() + 1e-6:
                        wrong.append(f"case {i} {name}: {cases[i].options}")
                calls[number] += 1
                if number == 0 and own.random() < 0.02:
                    cudnn_mha.cache_clear()
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]
    assert min(calls) > 0
    print(f"{sum(calls)} calls in {STRESS_SECONDS:g} s")


def run_script(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fork_after_import() -> None:
    said = run_script(
        """
        import os, torch, cudnn_mha
        import torch.nn.functional as F
        from cudnn_mha import reference
        cudnn_mha.enable()
        pid = os.fork()
        if pid == 0:
            q = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
            got = F.scaled_dot_product_attention(q, q, q)
            want, _ = reference.attention(q, q, q)
            right = (got.float() - want.float()).norm() < 0.01 * want.float().norm()
            os._exit(0 if right and cudnn_mha.status().served == 1 else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    assert said == "0\n"


def test_an_unmodified_script_runs_on_our_plans() -> None:
    """Only the report at its end knows of us; the entry point needs an installed package."""
    script = """
        import torch
        import cudnn_mha.autoload; cudnn_mha.autoload.autoload()
        import torch.nn.functional as F
        q = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        import cudnn_mha
        now = cudnn_mha.status()
        print(now.enabled, now.served, now.served_backward, now.fallbacks, now.provider)
        """
    assert run_script(script, TORCH_CUDNN_MHA_ENABLED="1") == "True 1 1 0 cudnn_mha\n"
    off = run_script(script, TORCH_CUDNN_MHA_ENABLED="")
    assert off == "False 0 0 0 PyTorch\n"


def test_status_counts_reasons() -> None:
    assert backend.provider() == backend.OURS
    assert str(cudnn_mha.status()).startswith("enabled: enable() was called")
