"""What `cudnn_sdpa` does on the GPU besides values: dropout, determinism, plans, dispatch."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cudnn_mha
from cudnn_mha import config, cudnn_sdpa, dispatch, functional, lengths, reference, runtime
from tests.oracle import Call, assert_right, ours
from tests.test_gpu_values import BF16, FP16, FP32, call, call_with_gradient, randn

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(dispatch, "_logged", set())
    yield
    torch.use_deterministic_algorithms(False)


def weights(p: float, queries: int, seed: int | None = 0) -> tuple[Tensor, Tensor]:
    """The attention weights over 128 keys that the forward and the backward really use."""
    batch, heads, keys = 8, 16, 128
    query = torch.zeros(batch, heads, queries, 128, device="cuda", dtype=FP16)
    key = randn(batch, heads, keys, 128, dtype=FP16)
    eye = torch.eye(128, device="cuda", dtype=FP16)
    value = eye.expand(batch, heads, keys, 128).contiguous().requires_grad_()
    if seed is not None:
        torch.manual_seed(seed)
    output = cudnn_sdpa(query, key, value, dropout_p=p, fallback=False)
    upstream = eye[:queries].expand(batch, heads, queries, 128).contiguous()
    (grad,) = torch.autograd.grad(output, value, upstream)
    return output.detach(), grad.transpose(-1, -2)[:, :, :queries]


@pytest.mark.parametrize("queries", [128, 1])
@pytest.mark.parametrize("p", [0.01, 0.05, 0.1, 0.125, 0.3, 0.5, 0.9])
def test_dropout_rate_and_scale(p: float, queries: int) -> None:
    forward, backward = weights(p, queries)
    count = forward.numel()
    rate = (forward == 0).double().mean().item()
    assert abs(rate - p) < 5 * math.sqrt(p * (1 - p) / count)
    kept = forward[forward != 0].double() * 128 * (1 - p)
    assert abs(kept.mean().item() - 1) < 1e-3
    # The backward drops exactly the weights that the forward dropped.
    assert torch.equal(forward == 0, backward == 0)


def test_dropout_is_reproducible_and_varies() -> None:
    first, _ = weights(0.2, 128, seed=1)
    again, _ = weights(0.2, 128, seed=1)
    other, _ = weights(0.2, 128, seed=2)
    further, _ = weights(0.2, 128, seed=None)
    assert torch.equal(first, again)
    for different in (other, further):
        share = ((first == 0) != (different == 0)).double().mean().item()
        assert abs(share - 0.32) < 0.01  # 2 p (1 - p): independent draws
    heads = first.flatten(0, 1) == 0
    assert abs((heads[0] != heads[1]).double().mean().item() - 0.32) < 0.02


def test_dropout_gradients() -> None:
    case = call_with_gradient(call(lengths=(128, 128), dims=(128, 128)))
    p = 0.25

    def run(value: Tensor) -> Tensor:
        torch.manual_seed(7)
        return cudnn_sdpa(case.query, case.key, value, dropout_p=p, fallback=False)

    # One-hot values show the mask, which the exact gradients then use.
    eye = torch.eye(128, device="cuda", dtype=BF16).expand(2, 4, 128, 128).contiguous()
    keep = run(eye) != 0
    torch.manual_seed(7)
    leaves = case.leaves()
    output = cudnn_sdpa(*leaves, dropout_p=p, fallback=False)
    got = torch.autograd.grad(output, leaves, case.grad_output)
    exact = case.leaves(torch.float64)
    right, _ = reference.attention(
        *exact, dropout_p=p, dropout_mask=keep, compute_dtype=torch.float64
    )
    assert case.grad_output is not None
    want = torch.autograd.grad(right, exact, case.grad_output.double())
    for a, b in zip((output.detach(), *got), (right.detach(), *want), strict=True):
        assert (a.double() - b).norm() < 0.01 * b.norm()


def test_dropout_draws_anew_at_each_replay_of_a_cuda_graph() -> None:
    query = torch.zeros(8, 16, 128, 128, device="cuda", dtype=FP16)
    value = torch.eye(128, device="cuda", dtype=FP16).expand(8, 16, 128, 128).contiguous()
    cudnn_sdpa(query, query, value, dropout_p=0.2, fallback=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = cudnn_sdpa(query, query, value, dropout_p=0.2, fallback=False)
    draws = []
    for _ in range(3):
        graph.replay()
        draws.append((output == 0).clone())
    assert abs(draws[0].double().mean().item() - 0.2) < 0.002
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert abs((draws[a] != draws[b]).double().mean().item() - 0.32) < 0.01


def test_all_dropped() -> None:
    query = randn(2, 4, 32, 64).requires_grad_()
    output = cudnn_sdpa(query, query, query, dropout_p=1.0)
    assert torch.equal(output, torch.zeros_like(output))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("masked", [False, True])
def test_forward_and_backward_in_a_cuda_graph(masked: bool) -> None:
    mask = torch.rand(200, 200, device="cuda") > 0.3 if masked else None
    case = call_with_gradient(call())
    leaves = case.leaves()

    def run() -> tuple[Tensor, ...]:
        output = cudnn_sdpa(*leaves, mask, is_causal=mask is None, fallback=False)
        return (output, *torch.autograd.grad(output, leaves, case.grad_output))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager = run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for leaf in leaves:
        leaf.data.mul_(0.5)
    graph.replay()
    again = run()
    for first, replayed, second in zip(eager, captured, again, strict=True):
        assert not torch.equal(first, replayed)
        assert (replayed.double() - second.double()).norm() <= 1e-3 * second.double().norm()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_builds_nothing() -> None:
    cudnn_mha.cache_clear()
    query = randn(2, 4, 56, 64)
    want = F.scaled_dot_product_attention(query, query, query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = cudnn_sdpa(query, query, query)
    graph.replay()
    assert (output.double() - want.double()).norm() < 0.01 * want.double().norm()
    assert cudnn_mha.cache_info().builds == 0
    with pytest.raises(cudnn_mha.CudnnSdpaUnsupportedError, match="capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            cudnn_sdpa(query, query, query, fallback=False)
    # What a capture could not have is not remembered as a refusal.
    cudnn_sdpa(query, query, query, fallback=False)
    assert cudnn_mha.cache_info().builds == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("setting", ["argument", "global"])
def test_determinism(causal: bool, setting: str) -> None:
    cudnn_mha.cache_clear()
    case = call_with_gradient(call(heads=(16, 16, 16), lengths=(512, 512), batch=8))
    case.options |= {"is_causal": causal}
    if setting == "argument":
        case.options["deterministic"] = True
    else:
        torch.use_deterministic_algorithms(True)
    runs = [ours(case) for _ in range(4)]
    for other in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(value, other[name]), name
    assert_right(case)
    (decision,) = functional._decisions.values()
    plans = [slot.plan for slot in decision.backward.values() if slot]
    assert plans and all(plan and plan.spec.deterministic for plan in plans)


def test_deterministic_fallback_is_deterministic() -> None:
    case = call_with_gradient(call(dims=(264, 264), batch=4, lengths=(512, 512)))
    case.options["deterministic"] = True
    runs = [ours(case, fallback=True) for _ in range(3)]
    for other in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(value, other[name]), name


KEY_CASES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "scale": ({"scale": 0.1}, {"scale": 0.9}),
    "causal": ({}, {"is_causal": True}),
    "dtype": ({"dtype": BF16}, {"dtype": FP16}),
    "length_q": ({"lengths": (200, 200)}, {"lengths": (201, 200)}),
    "length_kv": ({"lengths": (200, 200)}, {"lengths": (200, 201)}),
    "dim_qk": ({"dims": (64, 64)}, {"dims": (72, 64)}),
    "dim_v": ({"dims": (64, 64)}, {"dims": (64, 72)}),
    "heads": ({"heads": (4, 4, 4)}, {"heads": (4, 2, 2)}),
    "heads_v": ({"heads": (4, 2, 2)}, {"heads": (4, 2, 4)}),
    "batch": ({"batch": 2}, {"batch": 3}),
    "deterministic": ({}, {"deterministic": True}),
    "workspace_limit": ({}, {"workspace_limit": "1GiB"}),
}


@pytest.mark.parametrize("field", KEY_CASES)
def test_a_call_that_differs_in_one_field_is_right_too(field: str) -> None:
    for options in KEY_CASES[field]:
        assert_right(call(**options))


def test_strides_and_mask_dtypes_are_told_apart() -> None:
    base = call()
    packed = randn(2, 200, 2, 4, 64)
    interleaved = [packed[:, :, i].transpose(1, 2) for i in range(2)]
    assert_right(base)
    assert_right(Call(base.query, *interleaved))
    assert_right(Call(base.query, base.key, base.value))
    for dtype in (torch.bool, FP32, BF16, FP16):
        mask = randn(200, 200, dtype=FP32)
        assert_right(call(mask=mask > 0 if dtype == torch.bool else mask.to(dtype)))
    gradients = call_with_gradient(call())
    assert_right(gradients)
    gradients.grad_output = randn(2, 200, 4, 64).transpose(1, 2)
    assert_right(gradients)


def test_cache_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.LENGTHS, "exact")
    config.reload()
    cudnn_mha.cache_clear()
    case = call_with_gradient(call(lengths=(72, 88)))
    for _ in range(3):
        ours(case)
    info = cudnn_mha.cache_info()
    assert (info.builds, info.refusals, info.currsize) == (2, 0, 2)
    assert info.misses == 2 and info.hits >= 4 and info.build_seconds > 0
    monkeypatch.undo()
    config.reload()


def test_eviction_lets_go_and_rebuilds(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnn_mha.cache import plans

    monkeypatch.setenv(config.LENGTHS, "exact")
    config.reload()
    cudnn_mha.cache_clear()
    monkeypatch.setattr(plans, "_maxsize", 3)
    for length in (16, 24, 32, 40, 48, 16):
        assert_right(call(lengths=(length, length)), gradients=False)
    info = cudnn_mha.cache_info()
    assert info.currsize == 3 and info.evictions == 3 and info.builds == 6
    monkeypatch.undo()
    config.reload()


def test_workspace_limit_refuses_with_the_least_need() -> None:
    case = call_with_gradient(call(lengths=(512, 512)))
    with pytest.raises(cudnn_mha.CudnnSdpaUnsupportedError, match="workspace_limit = 1024"):
        ours(case, workspace_limit="1KiB")
    assert_right(case, workspace_limit="1KiB", fallback=True)
    assert_right(case, workspace_limit="1GiB")


def test_no_memory_for_the_workspace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(size: int, stream: int) -> int:
        raise torch.OutOfMemoryError("no memory left")

    case = call_with_gradient(call(lengths=(200, 300), mask=randn(200, 300, dtype=FP32)))
    ours(case)
    monkeypatch.setattr(runtime, "allocate", refuse)
    with caplog.at_level(logging.WARNING, "cudnn_mha"):
        assert_right(case, fallback=True)
    assert "no memory left" in caplog.text
    # The same where only the backward finds no memory.
    monkeypatch.undo()
    leaves = case.leaves()
    output = cudnn_sdpa(*leaves[:3], case.mask)
    monkeypatch.setattr(runtime, "allocate", refuse)
    got = torch.autograd.grad(output, leaves, case.grad_output)
    monkeypatch.undo()
    want = ours(case)
    for name, value in zip(("grad_query", "grad_key", "grad_value"), got, strict=True):
        assert (value.double() - want[name].double()).norm() < 0.02 * want[name].double().norm()


def test_fallback_logs_each_cause_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cudnn_mha"):
        for length in (16, 32, 48):
            query = torch.randn(1, 2, length, 64, device="cuda")
            got = cudnn_sdpa(query, query, query)
            want = F.scaled_dot_product_attention(query, query, query)
            assert torch.equal(got, want)
    assert caplog.text.count("falls back") == 1
    assert "float32" in caplog.text


def test_user_keeps_cudnn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = call()
    args = (case.query, case.key, case.value)
    cudnn_mha.cache_clear()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        want = F.scaled_dot_product_attention(*args)
        assert torch.equal(cudnn_sdpa(*args), want)
        with pytest.raises(cudnn_mha.CudnnSdpaUnsupportedError, match="sdp_backend"):
            cudnn_sdpa(*args, fallback=False)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        want = F.scaled_dot_product_attention(*args)
        assert torch.equal(cudnn_sdpa(*args), want)
    monkeypatch.setenv(config.DISABLED, "1")
    config.reload()
    try:
        with pytest.raises(cudnn_mha.CudnnSdpaUnsupportedError, match=config.DISABLED):
            cudnn_sdpa(*args, scale=0.123, fallback=False)
    finally:
        monkeypatch.undo()
        config.reload()
        cudnn_mha.cache_clear()
    assert cudnn_mha.cache_info().builds == 0
    cudnn_sdpa(*args, fallback=False)


def test_only_cudnn_allowed_and_not_served() -> None:
    query = randn(1, 2, 64, 264).requires_grad_()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        with pytest.raises(cudnn_mha.CudnnSdpaUnsupportedError, match="head_dim") as caught:
            cudnn_sdpa(query, query, query)
    assert {r.rule for r in caught.value.reasons} == {"head_dim", "no_backend"}
    assert torch._C._get_cudnn_sdp_enabled()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_fallback_never_uses_pytorchs_cudnn() -> None:
    """PyTorch's cuDNN would serve this call, and has not our remedies."""
    case = call_with_gradient(call(lengths=(512, 512)))
    leaves = case.leaves()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cudnn_sdpa(*leaves, workspace_limit=0)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_cudnn_attention" not in names
    assert torch._C._get_cudnn_sdp_enabled()


def test_double_backward_is_a_clear_error() -> None:
    query = randn(1, 2, 64, 64).requires_grad_()
    output = cudnn_sdpa(query, query, query, fallback=False)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(output.sum(), query, create_graph=True)


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    case = call_with_gradient(call(is_causal=True))
    leaves = case.leaves()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cudnn_sdpa(q, k, v, is_causal=True, fallback=False)

    output = checkpoint(layer, *leaves, use_reentrant=False)
    assert isinstance(output, Tensor)
    got = torch.autograd.grad(output, leaves, case.grad_output)
    want = ours(case)
    for name, value in zip(("grad_query", "grad_key", "grad_value"), got, strict=True):
        assert (value.double() - want[name].double()).norm() < 1e-3 * want[name].double().norm()


def test_side_streams() -> None:
    case = call(lengths=(1024, 1024), heads=(16, 16, 16))
    want = ours(case, gradients=False)["output"]
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                # The call must wait for this copy, which only this stream orders.
                torch.cuda._sleep(2_000_000)
                query = case.query.clone()
                output = cudnn_sdpa(query, case.key, case.value, fallback=False)
                assert torch.equal(output, want)
    torch.cuda.synchronize()


def test_many_threads() -> None:
    cases = [
        call_with_gradient(call(lengths=(n, n + 8), is_causal=n % 16 == 0))
        for n in range(64, 128, 8)
    ]
    cudnn_mha.cache_clear()
    wanted = [ours(case) for case in cases]
    builds = cudnn_mha.cache_info().builds
    cudnn_mha.cache_clear()
    wrong: list[str] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(40):
                    i = (seed + step) % len(cases)
                    got = ours(cases[i])
                    torch.cuda.current_stream().synchronize()
                    for name, value in got.items():
                        want = wanted[i][name].double()
                        if not (value.double() - want).norm() <= 2e-3 * want.norm():
                            wrong.append(f"{i} {name}")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cudnn_mha.cache_info().builds == builds  # each plan once, whoever asked first


def test_handles_of_ended_threads_are_used_again() -> None:
    case = call()
    ours(case, gradients=False)
    before = len(runtime._all_handles)
    for _ in range(10):
        thread = threading.Thread(target=ours, args=(case,), kwargs={"gradients": False})
        thread.start()
        thread.join()
    assert len(runtime._all_handles) <= before + 1


def test_explain_agrees_with_the_call() -> None:
    lengths.met.clear()
    cudnn_mha.cache_clear()
    case = call(lengths=(333, 777))
    served = cudnn_mha.explain(case.query, case.key, case.value, requires_grad=True)
    assert served.served and served.runs == "cuDNN"
    assert [g.engine is not None for g in served.graphs] == [True, True]
    assert "padding" in served.graphs[1].spec and served.graphs[1].remedies
    query = randn(1, 2, 64, 264).requires_grad_()
    refused = cudnn_mha.explain(query, query, query)
    assert not refused.served and refused.reasons[0].rule == "head_dim"
    with sdpa_kernel(SDPBackend.MATH):
        kept_out = cudnn_mha.explain(case.query, case.key, case.value)
    assert [r.rule for r in kept_out.reasons] == ["sdp_backend"]


def test_compiled_function_equals_eager() -> None:
    case = call(is_causal=True)
    compiled = torch.compile(
        lambda q, k, v: cudnn_sdpa(q * 2, k, v, is_causal=True, fallback=False) + 1,
        backend="eager",
    )
    want = cudnn_sdpa(case.query * 2, case.key, case.value, is_causal=True) + 1
    assert torch.equal(compiled(case.query, case.key, case.value), want)


def test_vmap_falls_back() -> None:
    query = randn(3, 2, 4, 32, 64)
    got = torch.vmap(lambda q: cudnn_sdpa(q, q, q))(query)
    want, _ = reference.attention(query, query, query, compute_dtype=torch.float64)
    assert (got.double() - want).norm() < 0.01 * want.norm()
