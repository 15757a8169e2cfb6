"""The operators of padded, packed and paged calls, without a GPU, and what compilers make of them.

Values are those of the fallback in float64, and those of plans that `machine` interprets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch.library import opcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cudnn_mha import (
    CudnnSdpaUnsupportedError,
    cudnn_sdpa,
    cudnn_sdpa_paged,
    cudnn_sdpa_varlen,
    functional,
    packed,
    padded,
    paged,
    reference,
    traced,
)
from cudnn_mha.extended_ops import (
    sdpa_padded_backward,
    sdpa_padded_forward,
    sdpa_padded_inference,
    sdpa_paged,
    sdpa_varlen_backward,
    sdpa_varlen_forward,
    sdpa_varlen_inference,
)
from cudnn_mha.ops import sdpa_forward
from tests import interpreter, test_paged
from tests.support import BSHD
from tests.test_extended import BAND, GQA, LENGTHS, from_definition, lens, qkv, spoiled
from tests.test_packed import Packed

B, H, SQ, SKV = 3, 4, 5, 7
FP16 = torch.float16
EXACT = 3e-6  # the log-sum-exp is float32, and the backward uses it

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls become operators as if a compiler looked on."""
    monkeypatch.setattr(functional, "_is_compiling", lambda: True)
    monkeypatch.setattr(traced, "applies", lambda given, options: True)


@pytest.fixture(params=["h200", "a100-sxm-80gb"])
def machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, operators: None
) -> interpreter.Machine:
    return interpreter.install(monkeypatch, padded, packed, paged, profile=request.param)


def close(got: Any, want: Any, tolerance: float) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def assert_right(
    leaves: list[Tensor],
    options: dict[str, Any],
    mask: Tensor | None = None,
    tolerance: float = EXACT,
    call: Function = cudnn_sdpa,
) -> None:
    """Output, gradients and, where none is wanted, log-sum-exp; padding holds NaN."""
    exact = [t.detach().double().requires_grad_() for t in leaves]
    exact_mask = mask
    if mask is not None and mask.is_floating_point():
        exact_mask = mask.detach().double().requires_grad_(mask.requires_grad)
        if mask.requires_grad:
            exact.append(exact_mask)
    want, sums = from_definition(exact[: len(leaves)], options, exact_mask)
    leaves = spoiled(leaves, options)
    sinks = {"sinks": leaves[3]} if len(leaves) > 3 else {}
    got = call(*leaves[:3], mask, **options, **sinks)
    assert got.dtype == leaves[0].dtype
    close([got], [want], tolerance)
    with torch.no_grad():
        close(call(*leaves[:3], mask, return_lse=True, **options, **sinks), (want, sums), tolerance)
    upstream = torch.randn(want.shape).to(got.dtype)
    wanted = torch.autograd.grad(want, exact, upstream.double())
    if "seq_lens_q" in options:
        beyond = torch.arange(want.shape[2]) >= options["seq_lens_q"][:, None]
        upstream = upstream.masked_fill(beyond[:, None, :, None], math.nan)
    given = [*leaves, *([mask] if mask is not None and mask.requires_grad else [])]
    close(torch.autograd.grad(got, given, upstream), wanted, tolerance)


# ----------------------------------------------------------------------------------------- padded


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("band", ["causal", "bottom right window", "bottom right both"])
def test_fallback(operators: None, band: str, sinks: bool, lengths: str) -> None:
    leaves = qkv(heads=(4, 2, 1), order=BSHD)
    if sinks:
        leaves.append(torch.randn(4, dtype=torch.float64).requires_grad_())
    for scores in ({}, {"softcap": 1.5, "alibi": True}):
        assert_right(leaves, BAND[band] | scores | LENGTHS[lengths] | GQA)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("band", ["causal", "bottom right window", "bottom right both"])
def test_plans(machine: interpreter.Machine, band: str, sinks: bool, lengths: str) -> None:
    leaves = qkv(heads=(4, 2, 1), dtype=FP16, order=BSHD)
    if sinks:
        leaves.append(torch.randn(4).requires_grad_())
    options = BAND[band] | LENGTHS[lengths] | GQA | {"fallback": False}
    if len(options) == 3 and not sinks:
        options["window"] = (3, 3)
    assert_right(leaves, options, tolerance=6e-3)
    assert [spec.backward for spec in machine.runs] == [False, False, True]


MASKS: dict[str, Callable[[], Tensor]] = {
    "bool": lambda: torch.rand(B, 1, SQ, SKV) > 0.3,
    "float": lambda: torch.randn(1, H, SQ, SKV),
    "low": lambda: torch.randn(1, H, SQ, SKV) - 2e4 * (torch.arange(SQ) == 1)[:, None],
    "gradient": lambda: torch.randn(B, H, SQ, SKV).requires_grad_(),
    "row": lambda: torch.randn(SKV).requires_grad_(),
}


@pytest.mark.parametrize("lengths", ["full", "empty"])
@pytest.mark.parametrize("kind", MASKS)
def test_plans_with_masks(machine: interpreter.Machine, kind: str, lengths: str) -> None:
    options = {"window": (3, 3), "fallback": False} | LENGTHS[lengths]
    # Of scores near -2e4 the output keeps what float32 keeps of them.
    tolerance = 2e-2 if kind == "low" else 8e-3
    assert_right(qkv(dtype=FP16), options, MASKS[kind](), tolerance)
    assert machine.runs


@pytest.mark.parametrize("kind", MASKS)
def test_fallback_with_masks(operators: None, kind: str) -> None:
    """A low row keeps its digits: its log-sum-exp is stashed less the row's largest entry."""
    leaves, mask = qkv(), MASKS[kind]()
    if kind == "low":
        mask = mask.round()  # so that float32 holds each entry and what it is less the largest
    assert_right(leaves, {"window": (3, 3)} | LENGTHS["both"], mask, tolerance=1e-5)


@pytest.mark.parametrize("lengths", ["full", "keys"])
def test_plans_with_other_options(machine: interpreter.Machine, lengths: str) -> None:
    own = LENGTHS[lengths] | {"fallback": False}
    causal = {"is_causal": True, "window": (3, -1)}
    assert_right(qkv(dims=(12, 20), dtype=FP16), own | causal, tolerance=6e-3)
    for scale in (-0.3, 0.0):
        assert_right(qkv(dtype=FP16), own | causal | {"scale": scale}, tolerance=6e-3)
    assert_right(qkv(dtype=FP16), own | {"is_causal": True, "alibi": True}, tolerance=6e-3)
    if lengths == "full":
        slopes = {"alibi_slopes": torch.rand(H, dtype=torch.float64)}
        assert_right(qkv(dtype=FP16), own | slopes, tolerance=6e-3)
        assert_right(qkv(dtype=FP16), own | {"softcap": 1.5}, tolerance=6e-3)
    assert_right(qkv((1, SKV), dtype=FP16), own | {"window": (2, 5)}, tolerance=6e-3)


def test_plans_of_other_shapes(machine: interpreter.Machine) -> None:
    query, key, value = (t.detach() for t in qkv(dtype=FP16))
    options = {"seq_lens_kv": lens(4), "fallback": False}
    want, _ = from_definition([t[:1] for t in (query, key, value)], options)
    close([cudnn_sdpa(query[0], key[0], value[0], **options)], want, 6e-3)
    options = {"seq_lens_kv": lens(4, 7, 1), "fallback": False}
    one = query[:1, :1]
    want, _ = from_definition([one.expand(B, H, -1, -1), key, value], options)
    close([cudnn_sdpa(one, key, value, **options)], [want], 6e-3)


def test_sinks_and_masks_that_want_no_gradient(machine: interpreter.Machine) -> None:
    leaves, sinks = qkv(dtype=FP16), torch.randn(H)
    mask = torch.randn(SQ, SKV)
    got: Any = cudnn_sdpa(*leaves, mask, sinks=sinks, fallback=False)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want, _ = from_definition([*exact, sinks.double()], {}, mask.double())
    close(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), exact), 1e-2)
    assert not any(s.grad_sinks or s.grad_bias for s in machine.runs)


def test_what_was_dropped_forward_is_dropped_backward(operators: None) -> None:
    """The mask that the stashed seed stands for, by the definition."""
    leaves = qkv(heads=(4, 2, 1))
    lengths = LENGTHS["both"]
    call = (*leaves, None, *lengths.values(), None, None, 0.4, True)
    output, _, seed, offset = sdpa_padded_forward(*call)
    generator = torch.Generator().manual_seed(int(seed))
    mask = torch.rand((B, H, SQ, SKV), generator=generator) >= 0.4
    exact = [t.detach().requires_grad_() for t in leaves]
    want, _ = reference.attention(*exact, None, 0.4, True, dropout_mask=mask, **lengths)
    close([output], [want], EXACT)
    upstream = torch.randn_like(want)
    close(
        torch.autograd.grad(output, leaves, upstream),
        torch.autograd.grad(want, exact, upstream),
        EXACT,
    )
    assert offset.shape == () and not torch.equal(sdpa_padded_forward(*call)[0], output)
    none = sdpa_padded_forward(*call[:8])
    assert [t.shape for t in none[2:]] == [(0,), (0,)]


def test_nothing_to_compute(operators: None) -> None:
    query, key, value = (t.detach().requires_grad_() for t in qkv((SQ, 0)))
    sinks = torch.randn(H, dtype=torch.float64).requires_grad_()
    output: Any = cudnn_sdpa(query, key, value, sinks=sinks)
    assert not output.any()
    grads = torch.autograd.grad(output.sum(), (query, key, value, sinks))
    assert not any(g.any() for g in grads)
    with torch.no_grad():
        _, lse = cudnn_sdpa(query, key, value, sinks=sinks, return_lse=True)
    close([lse], [sinks[:, None].expand(B, H, SQ)], EXACT)


# ----------------------------------------------------------------------------------------- packed


def packed_call(call: Packed, **more: Any) -> Any:
    sinks = {"sinks": call.leaves[3]} if len(call.leaves) > 3 else {}
    longest = max(call.lengths[0]), max(call.lengths[1])
    return cudnn_sdpa_varlen(*call.leaves[:3], *call.cu, *longest, **call.options, **sinks, **more)


def assert_packed(call: Packed, tolerance: float = EXACT, run: Function = packed_call) -> None:
    leaves, want, sums = call.exact()
    got = run(call)
    assert got.is_contiguous()
    close([got], [want], tolerance)
    with torch.no_grad():
        close(run(call, return_lse=True), (want, sums), tolerance)
    upstream = torch.randn(want.shape).to(got.dtype)
    wanted = torch.autograd.grad(want, leaves, upstream.double())
    upstream[call.nobodys(0)] = math.nan
    close(torch.autograd.grad(got, call.leaves, upstream), wanted, tolerance)


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("band", ["none", "causal", "bottom right window"])
def test_packed_fallback(operators: None, band: str, gap: int) -> None:
    for options in ({}, {"softcap": 1.5, "alibi": True}):
        assert_packed(Packed(gap=gap, sinks=True, **BAND[band], **options))
    assert_packed(Packed(gap=gap, heads=(H, H, H), scale=-0.3, **BAND[band]))


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("band", ["none", "causal", "bottom right window"])
def test_packed_plans(
    monkeypatch: pytest.MonkeyPatch, operators: None, band: str, sinks: bool, gap: int
) -> None:
    machine = interpreter.install(monkeypatch, packed, cudnn=92800)
    call = Packed(gap=gap, sinks=sinks, dtype=FP16, **BAND[band])
    assert_packed(call, 6e-3, lambda c, **more: packed_call(c, fallback=False, **more))
    assert machine.runs and all(spec.ragged for spec in machine.runs)


@pytest.mark.parametrize("why", ["device", "sinks"])
def test_packed_calls_that_cudnn_knows_on_padding(
    monkeypatch: pytest.MonkeyPatch, operators: None, why: str
) -> None:
    """On sm_80 there is no gradient of packed sequences, and none beside sinks before 9.26."""
    profile = "a100-sxm-80gb" if why == "device" else "h200"
    machine = interpreter.install(monkeypatch, packed, padded, profile=profile)
    goes = packed.goes_through_padding

    def on_the_machine(given: Any, gradient: bool, device: Any) -> bool:
        return goes(given, gradient, machine.device)

    monkeypatch.setattr(packed, "goes_through_padding", on_the_machine)
    call = Packed(sinks=why == "sinks", dtype=FP16, is_causal=True)
    assert_packed(call, 6e-3, lambda c, **more: packed_call(c, fallback=False, **more))
    (backward,) = (spec for spec in machine.runs if spec.backward)
    assert not backward.ragged and backward.batch == len(call.lengths[0])


def test_no_packed_keys(operators: None) -> None:
    query, key = torch.randn(4, H, 8).requires_grad_(), torch.randn(0, H, 8).requires_grad_()
    sinks = torch.randn(H).requires_grad_()
    cu = lens(0, 3), lens(0, 0)
    output: Any = cudnn_sdpa_varlen(query, key, key, *cu, 3, 0, sinks=sinks)
    assert not output.any()
    grads = torch.autograd.grad(output.sum(), (query, key, sinks))
    assert not any(g.any() for g in grads)
    with torch.no_grad():
        _, lse = cudnn_sdpa_varlen(query, key, key, *cu, 3, 0, sinks=sinks, return_lse=True)
    close([lse[:, :3]], [sinks[:, None].expand(H, 3)], EXACT)
    assert (lse[:, 3:] == -math.inf).all()


def test_packed_dropout_backward_is_that_of_forward(operators: None) -> None:
    """With values that are unit vectors the output shows which weights were kept."""
    lengths = (3, 5)
    cu = lens(0, *torch.tensor(lengths).cumsum(0).tolist())
    query = torch.zeros(8, 2, 8, dtype=torch.float64)
    value = torch.eye(8, dtype=torch.float64)[:, None].expand(8, 2, 8).clone().requires_grad_()
    output: Any = cudnn_sdpa_varlen(query, query, value, cu, cu, 5, 5, dropout_p=0.5)
    upstream = torch.eye(8, dtype=torch.float64)[:, None].expand(8, 2, 8)
    (grad,) = torch.autograd.grad(output, value, upstream)
    assert torch.equal(output.permute(1, 0, 2) == 0, grad.permute(1, 2, 0) == 0)
    assert 0 < (output == 0).sum() - 2 * (64 - 9 - 25) < 2 * (9 + 25)


# ------------------------------------------------------------------------------------------ pages

any_page_size = test_paged.any_page_size


@pytest.mark.usefixtures("any_page_size")
@pytest.mark.parametrize("queries", [1, 4])
def test_pages(machine: interpreter.Machine, queries: int) -> None:
    for options in ({}, {"is_causal": True}, {"sinks": torch.randn(H)}):
        more: dict[str, Any] = {"fallback": False}
        test_paged.assert_right(test_paged.tensors(queries, dtype=FP16), options, 6e-3, **more)
    assert machine.runs


def test_pages_by_the_fallback(operators: None) -> None:
    test_paged.assert_right(test_paged.tensors(3), {"is_causal": True, "alibi": True})


def test_pages_have_no_gradient(operators: None) -> None:
    query, key, value = test_paged.tensors(1)
    rest = (test_paged.TABLE, lens(*test_paged.LENGTHS))
    with pytest.raises(RuntimeError, match=r"has no gradient; call it under torch\.no_grad"):
        cudnn_sdpa_paged(query.requires_grad_(), key, value, *rest)
    output, _ = sdpa_paged(query, key, value, rest[0].clamp(0, 8), rest[1], None, None, None)
    with pytest.raises(RuntimeError, match="attention to pages has no gradient"):
        output.sum().backward()


# ---------------------------------------------------------------------------------------- opcheck


def passed(results: dict[str, str]) -> None:
    assert set(results.values()) == {"SUCCESS"}, results


def padded_arguments(mask: bool, sinks: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    leaves = qkv(heads=(4, 2, 1), order=BSHD)
    own = torch.randn(4, dtype=torch.float64).requires_grad_() if sinks else None
    bias = torch.randn(H, 1, SKV, dtype=torch.float64).requires_grad_() if mask else None
    tensors = (*leaves, bias, *LENGTHS["both"].values(), torch.rand(4), own)
    return (*tensors, 0.0, not mask), {"window": [3, -1], "causal_alignment": "bottom_right"}


# opcheck's own: it looks at the gradients of its copies.
opchecked = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@opchecked
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck_of_padded_calls(mask: bool, sinks: bool) -> None:
    arguments, options = padded_arguments(mask, sinks)
    wanted = {"bias_gradient": mask, "sinks_gradient": sinks}
    passed(opcheck(sdpa_padded_forward.default, arguments, options | wanted))
    plain = tuple(t.detach() if isinstance(t, Tensor) else t for t in arguments)
    for lse in (False, True):
        passed(opcheck(sdpa_padded_inference.default, plain, options | {"return_lse": lse}))
    left = [t.detach() for t in sdpa_padded_forward(*plain, **options)]
    backward = (torch.randn_like(left[0]), *plain[:8], *left, *plain[8:])
    passed(opcheck(sdpa_padded_backward.default, backward, options | wanted))


@opchecked
@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck_of_packed_calls(sinks: bool) -> None:
    call = Packed(gap=1, sinks=sinks)
    with torch.no_grad():
        for leaf in call.leaves:
            leaf.nan_to_num_()
    given = (*call.leaves[:3], *call.cu, lens(*call.lengths[0]), lens(*call.lengths[1]), None)
    arguments = (*given, call.leaves[3] if sinks else None, 5, 7, 0.0, True)
    options = {"sinks_gradient": sinks}
    passed(opcheck(sdpa_varlen_forward.default, arguments, options))
    plain = tuple(t.detach() if isinstance(t, Tensor) else t for t in arguments)
    for lse in (False, True):
        passed(opcheck(sdpa_varlen_inference.default, plain, {"return_lse": lse}))
    left = [t.detach() for t in sdpa_varlen_forward(*plain)]
    backward = (torch.randn_like(left[0]), *plain[:11], *left, *plain[11:])
    passed(opcheck(sdpa_varlen_backward.default, backward, options))


@opchecked
def test_opcheck_of_pages() -> None:
    given = (*test_paged.tensors(3), test_paged.TABLE.clamp(0, 8), lens(*test_paged.LENGTHS))
    for lse in (False, True):
        passed(opcheck(sdpa_paged.default, (*given, None, None, None), {"return_lse": lse}))


# --------------------------------------------------------------------------------- compiled calls


def compiled(function: Function, **options: Any) -> Function:
    result: Function = torch.compile(function, fullgraph=True, backend="aot_eager", **options)
    return result


@pytest.mark.parametrize("profile", ["h200", "a100-sxm-80gb"])
@pytest.mark.parametrize("name", ["window", "lengths", "sinks", "mask"])
def test_compiled_plans(monkeypatch: pytest.MonkeyPatch, profile: str, name: str) -> None:
    machine = interpreter.install(monkeypatch, padded, profile=profile)
    leaves = qkv(dtype=FP16, order=BSHD)
    options: dict[str, Any] = {"window": {"window": (2, 0)}, "lengths": LENGTHS["both"]}.get(
        name, {}
    )
    mask = None
    if name == "sinks":
        leaves.append(torch.randn(H).requires_grad_())
    if name == "mask":
        mask = torch.randn(1, H, 1, SKV).requires_grad_()
        options = {"softcap": 2.0}
    call = compiled(lambda *t, **o: cudnn_sdpa(*t, fallback=False, **o))
    assert_right(leaves, options, mask, 8e-3, call)
    assert [spec.backward for spec in machine.runs] == [False, False, True]


def test_compiled_packed_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = interpreter.install(monkeypatch, packed, cudnn=92800)
    call = compiled(lambda *t, **o: cudnn_sdpa_varlen(*t, fallback=False, **o))

    def run(given: Packed, **more: Any) -> Any:
        longest = max(given.lengths[0]), max(given.lengths[1])
        sinks = {"sinks": given.leaves[3]}
        return call(*given.leaves[:3], *given.cu, *longest, **given.options, **sinks, **more)

    assert_packed(Packed(sinks=True, dtype=FP16, is_causal=True, gap=1), 6e-3, run)
    assert [spec.backward for spec in machine.runs] == [False, False, True]


@pytest.mark.usefixtures("any_page_size")
def test_compiled_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = interpreter.install(monkeypatch, paged)
    given = test_paged.tensors(1, dtype=FP16)
    rest = (test_paged.TABLE, lens(*test_paged.LENGTHS))
    call = compiled(lambda *t: cudnn_sdpa_paged(*t, is_causal=True, return_lse=True))
    want = test_paged.by_sequence(*given, {"is_causal": True})
    close(call(*given, *rest), want, 6e-3)
    assert len(machine.runs) == 1


def test_one_graph_serves_all_lengths() -> None:
    counter = CompileCounter()

    def attend(query: Tensor, key: Tensor, lengths: Tensor) -> Any:
        output: Any = cudnn_sdpa(query, key, key, is_causal=True, seq_lens_kv=lengths)
        return output + 1

    function = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for batch, length in ((2, 6), (3, 9), (5, 31)):
        query = torch.randn(batch, H, length, 8, dtype=torch.float64)
        lengths = torch.arange(1, batch + 1)
        close([function(query, query, lengths)], [attend(query, query, lengths)], EXACT)
    assert counter.frame_count == 1


def test_one_graph_serves_all_packings() -> None:
    counter = CompileCounter()

    def attend(tokens: Tensor, cu: Tensor, longest: int) -> Any:
        output: Any = cudnn_sdpa_varlen(tokens, tokens, tokens, cu, cu, longest, longest)
        return output + 1

    function = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ((2, 8), (3, 4, 9), (31, 1, 1, 6)):
        cu = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
        tokens = torch.randn(sum(lengths), H, 8, dtype=torch.float64)
        got, want = (f(tokens, cu, max(lengths)) for f in (function, attend))
        close([got], [want], EXACT)
    assert counter.frame_count == 1


class Model(torch.nn.Module):
    def forward(self, tokens: Tensor, lengths: Tensor) -> Any:
        query, key, value = tokens.permute(2, 0, 3, 1, 4).unbind()
        return cudnn_sdpa(query, key, value, seq_lens_kv=lengths, is_causal=True)


def test_export() -> None:
    length = torch.export.Dim("length", min=2, max=64)
    tokens, lengths = torch.randn(B, 9, 3, H, 8), lens(9, 3, 5)
    with torch.no_grad():
        shapes = ({1: length}, None)
        program = torch.export.export(Model(), (tokens, lengths), dynamic_shapes=shapes)
    targets = {str(node.target) for node in program.graph.nodes}
    assert "cudnn_mha.sdpa_padded_inference.default" in targets
    for size in (9, 23):
        tokens = torch.randn(B, size, 3, H, 8)
        close([program.module()(tokens, lengths)], [Model()(tokens, lengths)], EXACT)


class Symbolic(torch.nn.Module):
    def forward(self, tokens: Tensor, cu: Tensor) -> Any:
        longest = tokens.shape[0]
        output: Any = cudnn_sdpa_varlen(
            tokens, tokens, tokens, cu, cu, longest, longest, window=(longest // 2, 0)
        )
        return output


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_numbers_that_follow_from_shapes(strict: bool) -> None:
    tokens, cu = torch.randn(14, H, 8), lens(0, 5, 14)
    shapes = ({0: torch.export.Dim("tokens", min=4, max=99)}, None)
    program = torch.export.export(Symbolic(), (tokens, cu), dynamic_shapes=shapes, strict=strict)
    for count in (14, 31):
        given = torch.randn(count, H, 8), lens(0, 9, count)
        close([program.module()(*given)], [Symbolic()(*given)], EXACT)


def test_lengths_that_are_known_only_when_it_runs() -> None:
    def run(tokens: Tensor, cu: Tensor) -> Any:
        longest: Any = cu.diff().max().item()
        return cudnn_sdpa_varlen(tokens, tokens, tokens, cu, cu, longest, longest)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for lengths in ((5, 9), (3, 11)):
            given = torch.randn(14, H, 8), lens(0, lengths[0], 14)
            close([compiled(run)(*given)], [run(*given)], EXACT)


def operations(function: Function, *tensors: Any) -> list[str]:
    backend = EagerAndRecordGraphs()
    torch.compile(function, fullgraph=True, backend=backend)(*tensors)
    (graph,) = backend.graphs
    names = [str(node.target) for node in graph.graph.nodes]
    return [name.removeprefix("cudnn_mha.") for name in names if name.startswith("cudnn_mha")]


def test_what_calls_become() -> None:
    leaves = qkv()
    plain = [t.detach() for t in leaves]
    assert operations(lambda *t: cudnn_sdpa(*t, window=(1, 1)), *leaves) == ["sdpa_padded_forward"]
    assert operations(lambda *t: cudnn_sdpa(*t, window=(1, 1), return_lse=True), *plain) == [
        "sdpa_padded_inference"
    ]
    assert operations(lambda *t: cudnn_sdpa(*t, window=(-1, -1)), *plain) == []


LEFT_ALONE: dict[str, Function] = {
    "score_mod": lambda *t: cudnn_sdpa(*t, score_mod=lambda s, q, kv: s * 0.5),
    "the gradient of a log-sum-exp": lambda *t: cudnn_sdpa(*t, window=(1, 1), return_lse=True)[1],
}


# Dynamo's own, where it goes on behind the break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_calls_that_compilers_leave_alone(name: str) -> None:
    """There the graph breaks, and values and gradients are those of the call as it is."""
    leaves = qkv()

    def call(*tensors: Tensor) -> Any:
        return LEFT_ALONE[name](tensors[0] * 2, *tensors[1:]) * 2

    assert torch._dynamo.explain(call)(*leaves).graph_break_count
    got, want = torch.compile(call, backend="eager")(*leaves), call(*leaves)
    close([got], [want], EXACT)
    close(*(torch.autograd.grad(r.sum(), leaves[:2]) for r in (got, want)), EXACT)


PLAIN: dict[str, Function] = {
    "padded": lambda t: cudnn_sdpa(t, t, t, window=(2, 0), sinks=t[0, :, 0, 0]),
    "packed": lambda t: cudnn_sdpa_varlen(
        *(t[0].transpose(0, 1),) * 3, lens(0, 2, SQ), lens(0, 2, SQ), SQ, SQ, is_causal=True
    ),
    "low mask": lambda t: cudnn_sdpa(
        t, t, t, torch.full((SQ, SQ), -1e9), seq_lens_kv=lens(1, 3, SQ)
    ),
}


def excluding(call: Function) -> Function:
    def run(tensor: Tensor) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return call(tensor)

    return run


@pytest.mark.parametrize("how", ["excluded", "vmap", "gradient"])
@pytest.mark.parametrize("name", PLAIN)
def test_where_cudnn_is_none_of_it_pytorch_computes_in_the_graph(name: str, how: str) -> None:
    """Cuda is excluded, or a transform looks on that has no plain tensors."""
    call = PLAIN[name]
    function = {
        "excluded": excluding(call),
        "vmap": torch.vmap(call),
        "gradient": torch.func.grad(lambda t: call(t).square().sum()),
    }[how]
    tensor = torch.randn(B, H, SQ, 8, dtype=torch.float64)
    given = torch.stack([tensor, tensor * 2]) if how == "vmap" else tensor
    close([compiled(function)(given)], [function(given)], EXACT)
    backend = EagerAndRecordGraphs()
    torch.compile(function, fullgraph=True, backend=backend)(given)
    assert not any("cudnn_mha" in str(n.target) for g in backend.graphs for n in g.graph.nodes)


def test_pages_where_cudnn_is_excluded() -> None:
    given = (*test_paged.tensors(2), test_paged.TABLE, lens(*test_paged.LENGTHS))

    def call(*tensors: Tensor) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return cudnn_sdpa_paged(*tensors, is_causal=True)

    close([compiled(call)(*given)], [call(*given)], EXACT)


def test_without_a_fallback_nothing_is_computed_where_cudnn_is_excluded() -> None:
    query = torch.randn(B, H, SQ, 8)
    call = excluding(lambda q: cudnn_sdpa(q, q, q, window=(1, 1), fallback=False))
    with pytest.raises(CudnnSdpaUnsupportedError, match="cuDNN allowed"):
        torch.compile(call, backend="eager")(query)


def test_errors_name_the_argument() -> None:
    query = torch.randn(B, H, SQ, 8)
    for options, words in (
        ({"seq_lens_kv": lens(1)}, r"seq_lens_kv must be of shape \(3,\), got \(1,\)"),
        ({"window": (-2, 0)}, "window must hold -1"),
        ({"sinks": torch.randn(3)}, r"sinks must be of shape \(4,\)"),
    ):
        call = torch.compile(lambda q, o=options: cudnn_sdpa(q, q, q, **o), backend="eager")
        with pytest.raises(ValueError, match=words):
            call(query)
    with pytest.raises(ValueError, match="sinks must be of shape"):
        sdpa_padded_forward(query, query, query, None, None, None, None, torch.randn(3))
    with pytest.raises(ValueError, match=r"\(B, H, S, D\) with the same B, got \(3, 4, 5, 8\), "):
        sdpa_padded_inference(query, query[:1], query[:1], *(None,) * 5)
    with pytest.raises(ValueError, match="max_seqlen_q must not be negative"):
        tokens, cu = query[0, :1].mT.contiguous(), lens(0, 1)
        sdpa_varlen_forward(tokens, tokens, tokens, cu, cu, *(None,) * 4, -1, 1)


def test_errors_of_the_operators() -> None:
    query = torch.randn(B, H, SQ, 8)
    none = (None,) * 5
    calls: list[tuple[str, Function]] = [
        (
            "workspace_limit must not be negative",
            lambda: sdpa_padded_inference(query, query, query, *none, workspace_limit=-1),
        ),
        ("window must be", lambda: sdpa_padded_inference(query, query, query, *none, window=[1])),
        (
            "bias_gradient=False",
            lambda: sdpa_padded_forward(
                query, query, query, torch.ones(SQ, SQ) > 0, *none[1:], bias_gradient=True
            ),
        ),
    ]
    for words, call in calls:
        with pytest.raises((ValueError, TypeError), match=words):
            call()
    forward = (query, query, query, *none)
    left = list(sdpa_padded_forward(*forward))
    wrong: dict[str, tuple[int, Tensor]] = {
        r"grad_out must be of shape \(3, 4, 5, 8\), got \(1, 4, 5, 8\)": (0, query[:1]),
        r"grad_out must be of the dtype of query": (0, query.double()),
        r"out must be of shape \(3, 4, 5, 8\)": (9, left[0][:, :2]),
        r"logsumexp must be of shape \(3, 4, 5\), got \(3, 4, 5, 1\)": (10, left[1][..., None]),
        r"philox_seed must be of shape \(0,\), got \(\)": (11, torch.zeros((), dtype=torch.int64)),
    }
    for words, (place, tensor) in wrong.items():
        arguments = [query, *forward, *left]
        arguments[place] = tensor
        with pytest.raises((ValueError, TypeError), match=words):
            sdpa_padded_backward(*arguments)
    case = Packed()
    given = [*case.leaves, *case.cu, None, None, None, None, 5, 7]
    left = [t.detach() for t in sdpa_varlen_forward(*given)]
    with pytest.raises(ValueError, match="out must be of shape"):
        sdpa_varlen_backward(left[0], *given, left[0][:1], *left[1:])


def test_a_result_may_be_changed_in_place() -> None:
    """But not differentiated then: it is stashed, as that of PyTorch's attention is."""
    leaves = qkv()
    for mask in (None, torch.randn(SQ, SKV)):
        output = sdpa_padded_forward(*leaves, mask, *(None,) * 4)[0]
        before = output.detach().clone()
        assert torch.equal(output.add_(1), before + 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output.sum(), leaves)
        output = sdpa_forward(*leaves, mask)[0]
        assert output.add_(1).isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checkpoints(backend: str) -> None:
    leaves = qkv()
    call = Packed()

    def padded_block(*tensors: Tensor) -> Any:
        return checkpoint(lambda *t: cudnn_sdpa(*t, window=(2, 2)), *tensors, use_reentrant=False)

    def packed_block(*tensors: Tensor) -> Any:
        return checkpoint(
            lambda *t: cudnn_sdpa_varlen(*t, *call.cu, 5, 7), *tensors, use_reentrant=False
        )

    for block, given in ((padded_block, leaves), (packed_block, call.leaves)):
        function = torch.compile(block, fullgraph=True, backend=backend)
        found, wanted = (torch.autograd.grad(f(*given).nansum(), given) for f in (function, block))
        close(found, wanted, EXACT)


def test_a_row_of_low_mask_values_is_the_same_by_all_ways(operators: None) -> None:
    query, key, value = (t.detach() for t in qkv(dtype=torch.float32))
    mask = torch.zeros(SQ, SKV)
    mask[3] = torch.finfo(torch.float32).min
    want, _ = reference.attention(query, key, value, window=(2, 2))
    got: Any = cudnn_sdpa(query, key, value, mask, window=(2, 2))
    trained: Any = cudnn_sdpa(query.requires_grad_(), key, value, mask, window=(2, 2))
    close([got, trained], [want, want], 1e-5)


def test_vmap_of_the_operators() -> None:
    leaves = [t.detach() for t in qkv()]
    stacked = torch.stack([leaves[0], leaves[0] * 2])

    def run(query: Tensor, dropout_p: float = 0.0) -> Any:
        return sdpa_padded_inference(
            query, *leaves[1:], None, None, lens(7, 3, 1), None, None, dropout_p
        )[0]

    close([torch.vmap(run)(stacked)], [torch.stack([run(q) for q in stacked])], EXACT)
    for randomness in ("error", "same"):
        with pytest.raises(RuntimeError, match="randomness='different'"):
            torch.vmap(run, (0, None), randomness=randomness)(stacked, 0.5)
    torch.manual_seed(0)
    found = torch.vmap(run, (0, None), randomness="different")(torch.stack([stacked[0]] * 2), 0.5)
    assert not torch.equal(found[0], found[1])


def test_without_a_fallback_every_reason_is_raised() -> None:
    query = torch.randn(B, H, SQ, 8)
    call = compiled(lambda q: cudnn_sdpa(q, q, q, window=(1, 1), fallback=False))
    with pytest.raises(CudnnSdpaUnsupportedError, match="must be on a CUDA device"):
        call(query)


def test_gradients_have_to_be_asked_for() -> None:
    arguments, options = padded_arguments(True, True)
    with pytest.raises(RuntimeError, match="with bias_gradient=True"):
        sdpa_padded_forward(*arguments, **options)[0].sum().backward()
    with pytest.raises(RuntimeError, match="with sinks_gradient=True"):
        sdpa_padded_forward(*arguments, **options, bias_gradient=True)[0].sum().backward()
    with pytest.raises(RuntimeError, match="call sdpa_padded_forward"):
        sdpa_padded_inference(*arguments, **options)[0].sum().backward()
    output = sdpa_padded_forward(*arguments, **options, bias_gradient=True, sinks_gradient=True)[0]
    (grad,) = torch.autograd.grad(output.sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="has no double backward"):
        grad.sum().backward()


def test_autocast() -> None:
    leaves = qkv(dtype=torch.float32)

    def attend(*tensors: Tensor) -> Any:
        return cudnn_sdpa(*tensors, window=(2, 1))

    with torch.autocast("cpu", torch.bfloat16):
        got = compiled(attend)(*leaves)
        direct = sdpa_padded_forward(*leaves, *(None,) * 5, window=(2, 1))[0]
    assert got.dtype == direct.dtype == torch.bfloat16
    close([got, direct], [attend(*leaves)] * 2, 3e-2)
    grads = torch.autograd.grad(got.float().sum(), leaves)
    assert {g.dtype for g in grads} == {torch.float32}


def test_flops_are_counted_as_if_nothing_were_masked() -> None:
    leaves = qkv(heads=(4, 2, 1))
    each = 2 * B * H * SQ * SKV
    with FlopCounterMode(display=False) as counter:
        output = sdpa_padded_forward(*leaves, *(None,) * 5)[0]
        forward = counter.get_total_flops()
        output.sum().backward()
    assert forward == each * (8 + 16)
    assert counter.get_total_flops() - forward == each * (3 * 8 + 2 * 16)
    call = Packed()
    with FlopCounterMode(display=False) as counter:
        sdpa_varlen_inference(*call.leaves, *call.cu, *(None,) * 4, 5, 7)
    tokens, heads, _ = call.leaves[0].shape
    assert counter.get_total_flops() == 2 * heads * tokens * 7 * (8 + 16)
    given = test_paged.tensors(2)
    with FlopCounterMode(display=False) as counter:
        table = test_paged.TABLE.clamp(0, 8)
        sdpa_paged(*given, table, lens(*test_paged.LENGTHS), None, None, None)
    keys = test_paged.COLUMNS * test_paged.PAGE
    assert counter.get_total_flops() == 2 * test_paged.B * H * 2 * keys * (8 + 16)
