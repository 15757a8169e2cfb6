"""`cudnn_sdpa` and `explain` on a machine without a GPU."""

from __future__ import annotations

import itertools
import json
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cudnn_mha import (
    CudnnSdpaUnsupportedError,
    Reason,
    cudnn_sdpa,
    devices,
    dispatch,
    explain,
    functional,
    reference,
)
from cudnn_mha.checks import HAZARDS, Kind
from cudnn_mha.config import DISABLED, VARIABLES, WORKSPACE_LIMIT, reload
from cudnn_mha.dispatch import Decision, fall_back
from cudnn_mha.inputs import Options, Outline, prepare

B, H, SQ, SKV, D = 2, 4, 5, 7, 8
SCORES = (B, H, SQ, SKV)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Sets a variable of the package and has it read."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def put(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        reload()

    reload()
    yield put
    monkeypatch.undo()
    reload()


def qkv(
    heads: tuple[int, int, int] = (H, H, H),
    dtype: torch.dtype = torch.float64,
    *,
    lead: tuple[int, ...] = (B,),
    grad: bool = True,
) -> list[Tensor]:
    shapes = [(*lead, heads[0], SQ, D), (*lead, heads[1], SKV, D), (*lead, heads[2], SKV, D + 4)]
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def torch_math(*args: Any, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def assert_same_with_gradients(got: Tensor, want: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(want)
    ours = torch.autograd.grad(got, leaves, weights)
    theirs = torch.autograd.grad(want, leaves, weights)
    for one, other in zip(ours, theirs, strict=True):
        tolerance = max(1e-5, torch.finfo(one.dtype).eps)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ values and gradients

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -0.7},
    "zero scale": {"scale": 0.0},
    "all": {"is_causal": True, "scale": 0.1},
}
FORMS = list(itertools.product(((B,), ()), (False, True)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("lead", "lse"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_pytorch(
    options: dict[str, Any], lead: tuple[int, ...], lse: bool, dtype: torch.dtype
) -> None:
    leaves = qkv(dtype=dtype, lead=lead)
    got = cudnn_sdpa(*leaves, **options, return_lse=lse)
    output = got[0] if lse else got
    assert output.dtype == dtype
    assert_same_with_gradients(output, torch_math(*leaves, **options), leaves)


@pytest.mark.parametrize("shape", [SCORES, (SQ, SKV), (B, 1, 1, SKV), (1, H, SQ, 1), (H, 1, SKV)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.bfloat16])
def test_masks_equal_pytorch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    leaves = qkv(dtype=torch.float32)
    mask = torch.randn(shape)
    mask = mask > -1 if dtype == torch.bool else mask.to(dtype).requires_grad_()
    given = mask if dtype == torch.bool else mask.float()
    if dtype != torch.bool:
        leaves.append(mask)
    got = cudnn_sdpa(*leaves[:3], mask)
    assert_same_with_gradients(got, torch_math(*leaves[:3], given), leaves)


@pytest.mark.parametrize("shape", [(SKV,), ()])
def test_masks_of_fewer_dimensions(shape: tuple[int, ...]) -> None:
    leaves = qkv()
    mask = torch.randn(shape) > 0
    expanded = mask.expand(SCORES)
    assert_same_with_gradients(cudnn_sdpa(*leaves, mask), torch_math(*leaves, expanded), leaves)


@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 1, 1), (6, 3, 3)])
@pytest.mark.parametrize("lse", [False, True])
def test_grouped_heads_equal_pytorch(heads: tuple[int, int, int], lse: bool) -> None:
    leaves = qkv(heads)
    got = cudnn_sdpa(*leaves, enable_gqa=True, return_lse=lse)
    output = got[0] if lse else got
    assert_same_with_gradients(output, torch_math(*leaves, enable_gqa=True), leaves)


def test_rows_that_hide_everything_are_zero() -> None:
    leaves = qkv()
    mask = torch.ones(SQ, SKV, dtype=torch.bool)
    mask[2] = False
    for lse in (False, True):
        got = cudnn_sdpa(*leaves, mask, return_lse=lse)
        output = got[0] if lse else got
        assert not output[:, :, 2].any()
        assert output[:, :, 1].all()
        gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
        assert all(g.isfinite().all() for g in gradients)
        assert not gradients[0][:, :, 2].any()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
@pytest.mark.parametrize("masked", [False, True])
def test_lse_is_that_of_the_scores(options: dict[str, Any], masked: bool) -> None:
    if masked and "is_causal" in options:
        options = {}
    query, key, value = qkv(dtype=torch.float32, grad=False)
    mask = torch.randn(SQ, SKV) if masked else None
    scores = query @ key.mT * options.get("scale", 1 / math.sqrt(D))
    if masked:
        scores = scores + mask
    if "is_causal" in options:
        hidden = torch.ones(SQ, SKV, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    _, lse = cudnn_sdpa(query, key, value, mask, return_lse=True, **options)
    assert lse.shape == (B, H, SQ)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-5)


def test_lse_has_a_gradient_where_pytorch_computes_it() -> None:
    query, key, value = qkv()
    _, lse = cudnn_sdpa(query, key, value, return_lse=True)
    (got,) = torch.autograd.grad(lse.sum(), query)
    scores = query @ key.mT / D**0.5
    (want,) = torch.autograd.grad(scores.logsumexp(-1).sum(), query)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_certain_dropout_drops_all() -> None:
    leaves = qkv()
    output = cudnn_sdpa(*leaves, dropout_p=1.0)
    assert output.shape == (B, H, SQ, D + 4)
    assert not output.any()
    gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert not any(g.any() for g in gradients)


def test_dropout_is_drawn_from_the_generator() -> None:
    query, key, _ = qkv(grad=False)
    value = torch.eye(SKV, dtype=torch.float64).expand(B, H, SKV, SKV)
    torch.manual_seed(1)
    one = cudnn_sdpa(query, key, value, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(cudnn_sdpa(query, key, value, dropout_p=0.5), one)
    assert not torch.equal(cudnn_sdpa(query, key, value, dropout_p=0.5), one)
    weights = cudnn_sdpa(query, key, value)
    kept = one != 0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(one[kept], 2 * weights[kept])


@pytest.mark.parametrize("sizes", [(0, SKV), (SQ, 0), (0, 0)])
@pytest.mark.parametrize("batch", [0, B])
@pytest.mark.parametrize("masked", [False, True])
def test_empty_tensors(sizes: tuple[int, int], batch: int, masked: bool) -> None:
    query = torch.randn(batch, H, sizes[0], D).bfloat16().requires_grad_()
    key = torch.randn(batch, H, sizes[1], D).bfloat16().requires_grad_()
    mask = torch.zeros(sizes) if masked else None
    output, lse = cudnn_sdpa(query, key, key, mask, return_lse=True)
    assert output.shape == (batch, H, sizes[0], D)
    assert output.dtype == torch.bfloat16
    assert not output.any()
    assert bool((lse == -math.inf).all())
    assert not torch.autograd.grad(output, query, torch.ones_like(output))[0].any()
    assert torch.equal(cudnn_sdpa(query, key, key, mask), output)


def test_deterministic_gradients_come_from_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = qkv()
    calls: list[int] = []
    inner = reference.attention

    def counted(*args: Any) -> Any:
        calls.append(1)
        return inner(*args)

    monkeypatch.setattr(reference, "attention", counted)
    output = cudnn_sdpa(*leaves, deterministic=True)
    assert len(calls) == 1
    assert_same_with_gradients(output, torch_math(*leaves), leaves)
    cudnn_sdpa(*leaves, deterministic=False)
    cudnn_sdpa(*[t.detach() for t in leaves], deterministic=True)
    assert len(calls) == 1
    torch.use_deterministic_algorithms(True)
    try:
        cudnn_sdpa(*leaves)
        cudnn_sdpa(*leaves, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(calls) == 2


# -------------------------------------------------------------- inside PyTorch's machinery


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_is_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    leaves = qkv()

    def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cudnn_sdpa(query * 2, key, value, is_causal=True).sin()

    compiled = torch.compile(block, backend=backend, fullgraph=True)
    want = torch_math(leaves[0] * 2, *leaves[1:], is_causal=True).sin()
    assert_same_with_gradients(compiled(*leaves), want, leaves)


@pytest.mark.parametrize("lse", [False, True])
def test_vmap(lse: bool) -> None:
    leaves = qkv(lead=(3, B), grad=False)
    got = torch.func.vmap(lambda q, k, v: cudnn_sdpa(q, k, v, return_lse=lse))(*leaves)
    folded = [t.flatten(0, 1) for t in leaves]
    want = torch_math(*folded).unflatten(0, (3, B))
    torch.testing.assert_close(got[0] if lse else got, want, rtol=1e-6, atol=1e-6)


def test_functional_gradients() -> None:
    query, key, value = qkv()
    gradient = torch.func.grad(lambda q: cudnn_sdpa(q, key.detach(), value.detach()).sum())
    want = torch.autograd.grad(torch_math(query, key, value).sum(), query)[0]
    torch.testing.assert_close(gradient(query.detach()), want)


def test_autocast_casts_as_for_pytorch() -> None:
    leaves = qkv(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, lse = cudnn_sdpa(*leaves, return_lse=True)
        plain = cudnn_sdpa(*leaves)
        double = cudnn_sdpa(*[t.double() for t in leaves])
    assert output.dtype == plain.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert double.dtype == torch.float64
    want = torch_math(*[t.bfloat16() for t in leaves])
    torch.testing.assert_close(output, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(plain, want, rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(plain.float().sum(), leaves)
    assert [g.dtype for g in gradients] == [torch.float32] * 3


def test_parameters_work_like_tensors() -> None:
    leaves = qkv()
    parameters = [torch.nn.Parameter(t.detach()) for t in leaves]
    assert torch.equal(cudnn_sdpa(*parameters), cudnn_sdpa(*leaves))


# ------------------------------------------------------------------- refusals and the log


def test_without_fallback_it_raises_with_reasons() -> None:
    with pytest.raises(CudnnSdpaUnsupportedError) as caught:
        cudnn_sdpa(*qkv(), fallback=False)
    assert [reason.rule for reason in caught.value.reasons] == ["device"]
    text = str(caught.value)
    assert "must be on a CUDA device, got cpu" in text
    assert "query=(2, 4, 5, 8):torch.float64" in text
    assert "value=(2, 4, 7, 12):torch.float64" in text


def test_nothing_to_compute_needs_no_fallback() -> None:
    empty = torch.zeros(B, H, 0, D)
    assert cudnn_sdpa(empty, empty, empty, fallback=False).shape == (B, H, 0, D)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"attn_mask": torch.zeros(SQ, SKV), "is_causal": True}, RuntimeError, "is_causal"),
        ({"dropout_p": 2}, ValueError, "dropout_p"),
        ({"scale": math.nan}, ValueError, "scale"),
        ({"scale": -1e39}, ValueError, r"scale must be finite in float32, got -1e\+39"),
        ({"attn_mask": torch.zeros(3)}, ValueError, "attn_mask"),
        ({"attn_mask": torch.zeros(SQ, SKV).int()}, TypeError, "attn_mask"),
        ({"workspace_limit": "much"}, ValueError, "workspace_limit"),
        ({"workspace_limit": 1.5}, TypeError, "workspace_limit"),
    ],
)
def test_calls_that_mean_nothing(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        cudnn_sdpa(*qkv(), **options)


def test_bad_workspace_limit_in_the_environment(
    environment: Callable[[str, str], None],
) -> None:
    with pytest.raises(ValueError, match=WORKSPACE_LIMIT):
        environment(WORKSPACE_LIMIT, "much")


def test_no_decision_is_kept_for_the_cpu() -> None:
    cudnn_sdpa(*qkv())
    assert functional._decisions == {}


class OnGpu:
    """Stands in for a query on a GPU where only that matters."""

    is_cuda = True
    shape = (B, H, SQ, D)
    dtype = torch.bfloat16


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of the warnings so far, of a log in which nothing was said before."""
    monkeypatch.setattr(dispatch, "_logged", set())
    caplog.set_level(logging.WARNING, "cudnn_mha")
    return caplog.messages


def decision(**options: Any) -> Decision:
    return Decision(Options(**options), Outline(4, D, 1.0))


def fallen_back(*reasons: Reason, **options: Any) -> Any:
    query: Any = OnGpu()
    return fall_back(query, query, query, None, decision(**options), reasons)


def test_each_cause_is_logged_once(
    caplog: pytest.LogCaptureFixture, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "compute", lambda *args, **options: ("output", None))
    head_dim = Reason("head_dim", "the head dimension is 3")
    other = Reason("head_dim", "the head dimension is 5")
    dropout = Reason("dropout", "too much dropout")
    for reasons in ((head_dim,), (head_dim,), (other,), (head_dim, dropout), (dropout,)):
        assert fallen_back(*reasons) == ("output", None)
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 3
    first, second, third = caplog.messages
    assert "falls back to PyTorch: the head dimension is 3 [head_dim] (first seen for" in first
    assert "query=(2, 4, 5, 8):torch.bfloat16" in first
    assert "[head_dim]; too much dropout [dropout]" in second
    assert "too much dropout [dropout] (first seen" in third


def test_nothing_is_logged_where_it_raises(
    caplog: pytest.LogCaptureFixture, warned: list[str]
) -> None:
    with pytest.raises(CudnnSdpaUnsupportedError, match="too much"):
        fallen_back(Reason("dropout", "too much dropout"), fallback=False)
    assert caplog.messages == []


def test_a_user_who_allows_no_other_backend_gets_none(
    caplog: pytest.LogCaptureFixture, warned: list[str]
) -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        with pytest.raises(CudnnSdpaUnsupportedError) as caught:
            fallen_back(Reason("dropout", "too much dropout"))
    assert [reason.rule for reason in caught.value.reasons] == ["dropout", "no_backend"]
    assert caplog.messages == []


def test_the_cpu_is_no_cause_to_log(caplog: pytest.LogCaptureFixture, warned: list[str]) -> None:
    cudnn_sdpa(*qkv())
    assert caplog.messages == []


# ------------------------------------------------------------------------------- explain


def test_explains_the_cpu() -> None:
    verdict = explain(*qkv(dtype=torch.bfloat16))
    assert not verdict.served
    assert [reason.rule for reason in verdict.reasons] == ["device"]
    assert verdict.graphs == ()
    assert "scaled_dot_product_attention" in verdict.runs
    assert "reason:" in str(verdict)


def test_explains_all_reasons_at_once(environment: Callable[[str, str], None]) -> None:
    environment(DISABLED, "1")
    with sdpa_kernel(SDPBackend.MATH):
        verdict = explain(*qkv(dtype=torch.float32, grad=False))
    assert {reason.rule for reason in verdict.reasons} == {
        "disabled",
        "sdp_backend",
        "device",
        "dtype",
    }
    kinds = {reason.rule: reason.kind for reason in verdict.reasons}
    assert kinds["disabled"] is kinds["sdp_backend"] is Kind.POLICY
    assert f"{DISABLED}=1" in str(verdict)


def test_looking_for_reasons_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 is not served, so neither a padded head dimension nor a mask is written out."""
    seen: list[Tensor | None] = []

    def spy(*given: Any) -> Any:
        seen.extend(given[:4])
        return prepare(*given)

    monkeypatch.setattr(dispatch, "prepare", spy)
    query, key, value = (t.detach()[..., :7] for t in qkv(dtype=torch.float32))
    mask = torch.ones(SQ, SKV, dtype=torch.bool)
    found = dispatch.decide(
        query, key, value, mask, Options(), gradient=True, device=devices.described("h200")
    )
    assert [reason.rule for reason in found.reasons] == ["dtype"]
    assert len(seen) == 4 and all(t is not None and t.is_meta for t in seen)


def test_a_disabled_package_still_computes(environment: Callable[[str, str], None]) -> None:
    environment(DISABLED, "1")
    leaves = qkv()
    assert_same_with_gradients(cudnn_sdpa(*leaves), torch_math(*leaves), leaves)


def test_explains_a_described_gpu() -> None:
    tail = next(hazard for hazard in HAZARDS if hazard.name == "backward_tail")
    shape = (1, 4, 200, 64)
    verdict = explain(shape, shape, shape, is_causal=True, requires_grad=True, gpu="h200")
    assert verdict.served
    assert verdict.device == "NVIDIA H200 (sm_90, described)"
    assert verdict.reasons == ()
    assert verdict.runs == "cuDNN"
    forward, backward = verdict.graphs
    assert forward.spec.startswith("forward query=1x4x200x64:bfloat16")
    assert forward.spec.endswith("causal lse")
    assert forward.remedies == ()
    assert backward.spec.endswith("causal padding")
    assert len(backward.remedies) == 1
    assert tail.remedy in backward.remedies[0]
    assert tail.cost in backward.remedies[0]
    for graph in verdict.graphs:
        assert graph.engine
        assert graph.engine.startswith("eng")
        assert graph.workspace
    text = str(verdict)
    assert text.startswith("served by cuDNN on NVIDIA H200")
    assert f"engine {backward.engine}, workspace {backward.workspace} bytes" in text
    again = json.loads(json.dumps(verdict.to_dict()))
    assert again["graphs"][1]["workspace"] == backward.workspace


def test_explains_a_refusal_by_every_graph() -> None:
    shape = (1, 4, 1, 512)
    verdict = explain(shape, shape, shape, dropout_p=0.3, requires_grad=True, gpu="a10")
    assert not verdict.served
    assert {r.rule for r in verdict.reasons} == {"dropout", "head_dim", "single_token"}
    assert len(verdict.reasons) == 3  # what holds for both graphs is said once
    assert [graph.engine for graph in verdict.graphs] == [None, None]
    assert all(str(reason) in str(verdict) for reason in verdict.reasons)


def test_explains_who_computes_instead() -> None:
    shape = (1, 4, 16, 12)
    for options, runs in (
        ({}, "torch.nn.functional.scaled_dot_product_attention, without cuDNN"),
        ({"return_lse": True}, "cudnn_mha.reference, plain PyTorch"),
        ({"deterministic": True, "requires_grad": True}, "cudnn_mha.reference, plain PyTorch"),
    ):
        verdict = explain(shape, shape, shape, dropout_p=0.3, gpu="a10", **options)
        assert verdict.runs == runs


def test_explains_a_workspace_limit() -> None:
    shape = (1, 4, 256, 64)
    verdict = explain(shape, shape, shape, workspace_limit="1B", requires_grad=True, gpu="h200")
    assert not verdict.served
    assert {reason.rule for reason in verdict.reasons} == {"workspace_limit"}


@pytest.mark.parametrize(
    ("scale", "sign", "left"), [(0, 0, "1"), (-0.0, 0, "1"), (-0.25, -1, "0.25")]
)
def test_explains_what_becomes_of_a_scale_that_is_not_positive(
    scale: float, sign: int, left: str
) -> None:
    shape = (1, 4, 128, 64)
    verdict = explain(shape, shape, shape, scale=scale, requires_grad=True, gpu="h200")
    assert [len(graph.remedies) for graph in verdict.graphs] == [1, 1]
    for graph in verdict.graphs:
        assert f" scale={left}" in graph.spec
        assert graph.remedies[0].startswith(
            f"scale is {scale:g}: the query is multiplied by its sign, {sign}, and the graph "
            f"takes scale {left} ("
        )
        assert f"remedy: {graph.remedies[0]}" in str(verdict)
    positive = explain(shape, shape, shape, scale=0.25, requires_grad=True, gpu="h200")
    assert [graph.remedies for graph in positive.graphs] == [(), ()]


def test_explain_refuses_what_the_call_refuses() -> None:
    shape = (1, 4, 16, 8)
    with pytest.raises(ValueError, match=r"gpu must be one of .*h200.*, got 'gtx'"):
        explain(shape, shape, shape, gpu="gtx")
    with pytest.raises(ValueError, match="same head dimension"):
        explain(shape, (1, 4, 16, 16), shape, gpu="h200")
    with pytest.raises(RuntimeError, match="is_causal"):
        explain(shape, shape, shape, (16, 16), is_causal=True, gpu="h200")


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("1,4,16,8", TypeError, "a shape of whole numbers such as (4, 32, 4096, 128), got '1,4,"),
        (b"\1\4\10\10", TypeError, "got b'"),
        (("1", "4", "16", "8"), TypeError, "got ('1', '4', '16', '8')"),
        ((1, 4, 16.0, 8), TypeError, "got (1, 4, 16.0, 8)"),
        (16, TypeError, "got 16"),
        ((1, 4, -16, 8), ValueError, "no negative size, got (1, 4, -16, 8)"),
        ((1, 4, 10**12, 10**12), ValueError, "at most 2^48 elements"),
    ],
)
def test_explain_names_what_is_no_shape(
    name: str, given: Any, error: type[Exception], words: str
) -> None:
    shape = (1, 4, 16, 8)
    shapes = {"query": shape, "key": shape, "value": shape} | {name: given}
    with pytest.raises(error) as caught:
        explain(**shapes, gpu="h200")
    assert str(caught.value).startswith(f"{name} must ")
    assert words in str(caught.value)


def test_explain_takes_every_kind_of_whole_number() -> None:
    shape = np.array((1, 4, 16, 8))
    verdict = explain(shape, torch.Size(shape.tolist()), shape.tolist(), gpu="h200")
    assert verdict.graphs[0].spec.startswith("forward query=1x4x16x8:bfloat16 key=1x4x16x8:")


LONG = 10**11


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 1, LONG, 8),) * 3 + ((LONG, 1),), f"attn_mask would be of shape ({LONG}, {LONG})"),
        (
            ((1, 1, LONG, 8), (1, 1, 8, 8), (1, 1, 8, LONG)),
            f"the output would be of shape (1, 1, {LONG}, {LONG})",
        ),
        (
            ((LONG, 1, 8, 8), (1, 1, LONG, 8), (1, 1, LONG, 8)),
            f"key would be of shape ({LONG}, 1, {LONG}, 8)",
        ),
        (
            ((LONG, 1, 8, 8), (1, LONG, 8, 8), (1, LONG, 8, 8)),
            f"query would be of shape ({LONG}, {LONG}, 8, 8)",
        ),
    ],
)
def test_explain_refuses_what_cannot_be_counted(
    shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        explain(*shapes, gpu="h200")
    assert str(caught.value).startswith(message)
    assert "no GPU holds" in str(caught.value)


def test_explains_that_a_call_is_larger_than_the_gpu() -> None:
    shape = (1, 1, 64, 10**9)
    verdict = explain(shape, shape, shape, gpu="h200")
    assert [(reason.rule, reason.kind) for reason in verdict.reasons] == [
        ("memory", Kind.UNAVAILABLE)
    ]
    assert verdict.reasons[0].message == (
        "the tensors of the call take 358 GiB, and NVIDIA H200 has 140 GiB; make the call smaller"
    )
    assert not verdict.served
    assert verdict.graphs[0].engine is None
    assert verdict.runs == "nothing, since the tensors do not fit into the GPU's memory"

    once = torch.empty(1, 1, 10**9, 64, dtype=torch.bfloat16, device="meta")
    assert explain(once, once, once, gpu="h200").served  # 119 GiB
    repeated = once[:, :, :1].expand(1, 1, 10**9, 64)
    assert explain(repeated, repeated[..., :64], repeated, gpu="h200").served


def test_an_error_survives_pickling() -> None:
    """As it does on the way out of a process pool."""
    with pytest.raises(CudnnSdpaUnsupportedError) as caught:
        cudnn_sdpa(*qkv(), fallback=False)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.reasons == caught.value.reasons


def test_no_fallback_holds_in_compiled_code() -> None:
    compiled = torch.compile(lambda *t: cudnn_sdpa(*t, fallback=False), backend="eager")
    with pytest.raises(CudnnSdpaUnsupportedError, match="on a CUDA device"):
        compiled(*qkv())


def test_a_mask_may_have_the_dtype_of_the_query() -> None:
    leaves = qkv(dtype=torch.float64)
    mask = torch.randn(SCORES, dtype=torch.float64).requires_grad_()
    got = cudnn_sdpa(*leaves, mask)
    assert_same_with_gradients(got, torch_math(*leaves, mask), [*leaves, mask])


@pytest.mark.parametrize("name", ["H200", "h200"])
def test_names_of_gpus_have_no_case(name: str) -> None:
    shape = (1, 2, 64, 64)
    assert explain(shape, shape, shape, gpu=name).served


def test_explains_where_tensors_are() -> None:
    (reason,) = explain(*qkv(dtype=torch.float16)).reasons
    assert reason.message == "the tensors must be on a CUDA device, got cpu"
