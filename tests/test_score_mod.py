"""Functions on the scores: what is traced of them, its derivative, and how calls with them run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from cudnn_mha import (
    CudnnSdpaUnsupportedError,
    checks,
    cudnn_sdpa,
    devices,
    explain,
    padded,
    recording,
    reference,
    runtime,
)
from cudnn_mha.expressions import (
    OPERANDS,
    Expression,
    derivative,
    first_hand,
    from_lists,
    numbers,
    text,
    to_lists,
)
from cudnn_mha.graph_builder import constants, operands
from cudnn_mha.plan import compile_plan
from cudnn_mha.score_mod import MAX_IN_DERIVATIVE, MAX_OPERATIONS, ScoreMod, on_tensors, trace
from cudnn_mha.spec import AttentionSpec
from cudnn_mha.terms import Terms, make_terms
from tests import interpreter
from tests.support import BACKWARD, FORWARD, PROFILES, attention, refusal
from tests.test_extended import BAND, SCORES, assert_right, lens, qkv, route


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def cap(score: Any, q_index: Any, kv_index: Any) -> Any:
    return 5.0 * torch.tanh(score / 5.0)


def distance(score: Any, q_index: Any, kv_index: Any) -> Any:
    return score - 0.25 * torch.log(1 + abs(q_index - kv_index))


def everything(score: Any, q_index: Any, kv_index: Any) -> Any:
    """Every operation there is."""
    gate = torch.sigmoid(score) + torch.exp(-abs(score))
    ratio = score / (1 + abs(score)) - 1 / torch.sqrt(q_index + 2)
    far = torch.minimum(torch.log(kv_index + 1), torch.maximum(score, q_index * 0.25))
    return torch.clamp(torch.tanh(gate * ratio) + far, min=-0.5, max=2)


MODS: dict[str, ScoreMod] = {
    "cap": cap,
    "distance": distance,
    "everything": everything,
    "scaled": lambda score, q_index, kv_index: 2 * score * torch.log(kv_index + 2),
    "capped distance": lambda s, q, k: 2 * torch.tanh(s / 2) - 0.1 * abs(q - k),
}


# ------------------------------------------------------------------------------------------ trace

INVERSE = ("reciprocal", ("add", "q_index", 1.0))
TRACED: list[tuple[ScoreMod, Expression]] = [
    (cap, ("mul", ("tanh", ("mul", "score", 0.2)), 5.0)),
    (lambda s, q, k: s + q - k, ("sub", ("add", "score", "q_index"), "kv_index")),
    (lambda s, q, k: s - 2, ("add", "score", -2.0)),
    (lambda s, q, k: 2 - s, ("add", ("neg", "score"), 2.0)),
    (lambda s, q, k: s + 1 / (q + 1), ("add", "score", INVERSE)),
    (lambda s, q, k: s + 2 / (q + 1), ("add", "score", ("mul", INVERSE, 2.0))),
    (lambda s, q, k: s / k, ("div", "score", "kv_index")),
    (lambda s, q, k: +abs(-s), ("abs", ("neg", "score"))),
    (lambda s, q, k: torch.abs(input=s), ("abs", "score")),
    (lambda s, q, k: torch.clamp(s, -1, max=3), ("min", ("max", "score", -1.0), 3.0)),
    (lambda s, q, k: torch.clamp(s, max=k), ("min", "score", "kv_index")),
    (lambda s, q, k: torch.maximum(k, s), ("max", "kv_index", "score")),
    (lambda s, q, k: s * np.float32(0.5) + np.int64(3), ("add", ("mul", "score", 0.5), 3.0)),
    (lambda s, q, k: np.float64(0.5) * s, ("mul", "score", 0.5)),
]


@pytest.mark.parametrize(("score_mod", "expression"), TRACED)
def test_what_is_traced(score_mod: ScoreMod, expression: Expression) -> None:
    found = trace(score_mod)
    assert found == expression
    assert all(type(number) is float for number in numbers(cast(Any, found)))


def test_two_functions_that_build_the_same_are_the_same() -> None:
    def made(bound: float) -> ScoreMod:
        return lambda score, query, key: torch.tanh(score / bound) * bound

    one, other = make_terms(False, "top_left", None, None, False, trace(made(3))), made(3.0)
    assert one == make_terms(False, "top_left", None, None, False, trace(other))
    assert hash(one) == hash(make_terms(False, "top_left", None, None, False, trace(other)))
    assert one != make_terms(False, "top_left", None, None, False, trace(made(4)))


def test_the_score_itself_is_no_change() -> None:
    assert trace(lambda score, q, k: score) is None
    assert make_terms(False, "top_left", None, None, False, trace(lambda s, q, k: +s)) == Terms()


TENSOR = torch.ones(3)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (3, TypeError, r"must be a function of \(score, q_index, kv_index\) or None, got 3"),
    (lambda s, q, k: 1.0, TypeError, "must return the new score, made of its arguments, got 1.0"),
    (lambda s, q, k: None, TypeError, "must return the new score, .* got None"),
    (lambda s, q, k: q - k, ValueError, r"depend on the score, got sub\(q_index, kv_index\); put"),
    (lambda s, q, k: torch.log(s), ValueError, "a derivative where the score is 0, got log.score"),
    (lambda s, q, k: q / s, ValueError, "must have a derivative where the score is 0"),
    (lambda s, q, k: s if s > 0 else -s, TypeError, r"must not compare values; it may use \+ - "),
    (lambda s, q, k: s if s else -s, TypeError, "must not ask whether a value is true"),
    (lambda s, q, k: s * (q == k), TypeError, "must not compare values"),
    (
        lambda s, q, k: max(s, 0),
        TypeError,
        "must not compare values; .* maximum, minimum and clamp",
    ),
    (lambda s, q, k: math.tanh(s), TypeError, "must not make a number of a value"),
    (lambda s, q, k: s**2, TypeError, "must not use other operators"),
    (lambda s, q, k: s[0], TypeError, "must not use other operators"),
    (lambda s, q, k: s.tanh(), TypeError, "must not use .tanh of a value; .* torch.tanh"),
    (lambda s, q, k: torch.where(s, s, q), TypeError, "must not call where of PyTorch"),
    (lambda s, q, k: torch.cos(s), TypeError, "must not call cos of PyTorch"),
    (lambda s, q, k: torch.nn.functional.softplus(s), TypeError, "must not call softplus of PyT"),
    (lambda s, q, k: s + TENSOR, TypeError, r"must not use tensors, .* got one of shape \(3,\)"),
    (lambda s, q, k: TENSOR * s, TypeError, r"must not use tensors, .* use numbers, or attn_mask"),
    (lambda s, q, k: torch.maximum(s, TENSOR), TypeError, "must not use tensors"),
    (lambda s, q, k: torch.clamp(s, min=TENSOR), TypeError, "must not use tensors"),
    (lambda s, q, k: s * np.ones(3), TypeError, "must compute with its arguments and numbers, got"),
    (lambda s, q, k: s + "1", TypeError, "must compute with its arguments and numbers, got '1'"),
    (lambda s, q, k: s * True, TypeError, "must compute with its arguments and numbers, got True"),
    (lambda s, q, k: s * math.inf, ValueError, "must be finite in float32, got inf"),
    (lambda s, q, k: s * 1e39, ValueError, r"must be finite in float32, got 1e\+39"),
    (lambda s, q, k: s * 10**400, ValueError, "must be finite in float32, got inf"),
    (lambda s, q, k: torch.clamp(s, max=10**400), ValueError, "must be finite in float32, got inf"),
    (lambda s, q, k: s / 0, ValueError, "divides score by 0, whose reciprocal is not finite in"),
    (lambda s, q, k: s / 1e-42, ValueError, "divides score by 1e-42, whose reciprocal is not fin"),
    (lambda s, q, k: s / 10**400, ValueError, "must be finite in float32, got inf"),
    (
        lambda s, q, k: s * 1e30 * 1e30,
        ValueError,
        r"got 1e\+60 in that of mul\(mul\(score, 1e\+30\), 1e\+30\); make its factors smaller",
    ),
    (lambda s, q, k: torch.minimum(s, 5.0), TypeError, r"no numbers; .* torch.clamp\(x, max="),
    (lambda s, q, k: torch.maximum(0, s), TypeError, r"torch.clamp\(x, min=number\) is the max"),
    (
        lambda score, b, h, q_idx, kv_idx: score,
        TypeError,
        r"must take \(score, q_index, kv_index\), got a function of \(score, b, h, q_idx, kv_idx\)"
        "; batch and head are not available: what depends on them goes into attn_mask",
    ),
    (lambda s: s, TypeError, r"must take \(score, q_index, kv_index\), got a function of \(s\)"),
    (lambda s, q, k: torch.clamp(s), ValueError, "needs min or max, got neither"),
    (
        lambda s, q, k: sum((s * n for n in range(2, MAX_OPERATIONS)), s),
        ValueError,
        f"must be of at most {MAX_OPERATIONS} operations, got {MAX_OPERATIONS + 2}",
    ),
]


@pytest.mark.parametrize(("score_mod", "error", "message"), REFUSED)
def test_what_no_expression_says_is_named(
    score_mod: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        cudnn_sdpa(*qkv(), score_mod=score_mod)
    assert "score_mod" in str(caught.value)


def test_errors_of_the_function_itself_are_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        trace(lambda s, q, k: s * (1 / 0))
    with pytest.raises(TypeError, match="unsupported operand"):
        trace(lambda s, q, k: s * cast(Any, None + 1))  # type: ignore[operator]


# ------------------------------------------------------------------------------------ expressions


def expressions() -> st.SearchStrategy[Expression]:
    """Some of the score, none that is infinite for small scores and indices."""
    finite = st.floats(-2, 2, width=32)
    leaves = st.sampled_from(["score", "score", "q_index", "kv_index"])

    def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        operand = inner | finite
        safe = st.builds(lambda x: ("add", ("abs", x), 0.5), inner)  # which is above 0
        bounded = st.builds(lambda x: ("min", x, 2.0), inner)
        return (
            st.tuples(st.sampled_from(["add", "mul", "max", "min"]), inner, operand)
            | st.tuples(st.just("sub"), inner, inner)
            | st.tuples(st.sampled_from(["neg", "abs", "tanh", "sigmoid"]), inner)
            | st.tuples(st.sampled_from(["log", "sqrt", "reciprocal"]), safe)
            | st.tuples(st.just("div"), inner, safe)
            | st.tuples(st.just("exp"), bounded)
        )

    return st.recursive(leaves, grown, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(expression=expressions(), seed=st.integers(0, 99))
def test_derivatives_are_those_of_autograd(expression: Expression, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    score, upstream = torch.randn(2, 4, 5, generator=rng, dtype=torch.float64).unbind()
    rows, columns = torch.rand(2, 4, 5, generator=rng, dtype=torch.float64).unbind()
    score.requires_grad_()
    modified = interpreter.computed(expression)(score, rows, columns)
    want = torch.zeros_like(score)
    if modified.requires_grad:
        (want,) = torch.autograd.grad(modified, score, upstream)
    change = derivative(expression)
    known = {"score": score, "q_index": rows, "kv_index": columns, "gradient": upstream}
    got = torch.zeros_like(score) if change == 0.0 else interpreter.evaluated(change, known)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def seconds(expression: Expression) -> list[Expression]:
    """What stands second in the operations of an expression."""
    if not isinstance(expression, tuple):
        return []
    inner = [second for operand in expression[1:] for second in seconds(operand)]
    return [*expression[2:], *inner]


@settings(max_examples=100, deadline=None)
@given(expression=expressions(), seed=st.integers(0, 99))
def test_neither_scores_nor_their_gradient_stand_second(expression: Expression, seed: int) -> None:
    values = torch.rand(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    known = dict(zip(("score", "q_index", "kv_index", "gradient"), values, strict=True))
    for wanted in (expression, derivative(expression), ("sub", expression, "score")):
        found = first_hand(wanted)
        assert not {"score", "gradient"} & set(seconds(found))
        if wanted != 0.0:
            got, want = (interpreter.evaluated(each, known) for each in (found, wanted))
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("mod", [lambda s, q, k: s * s, lambda s, q, k: torch.tanh(s) * s])
def test_graphs_have_copies_of_the_scores(mod: ScoreMod) -> None:
    """Kernels of cuDNN 9.28 read other memory where the scores stand second."""
    spec = attention(score_mod=trace(mod))
    assert [value for _, value in constants(spec).values()] == [1.0]


def test_there_is_room_for_all_numbers() -> None:
    def many(score: Any, q_index: Any, kv_index: Any) -> Any:
        for number in range(MAX_OPERATIONS):
            score = score * (1 + number / 64)
        return score

    spec = attention(BACKWARD, score_mod=trace(many), causal=True)
    assert 32 < len(operands(spec)) <= runtime.MOST_OPERANDS


def test_derivatives_that_grow_too_large_are_refused_at_once() -> None:
    def nested(score: Any, q_index: Any, kv_index: Any) -> Any:
        for _ in range(MAX_OPERATIONS):
            score = torch.tanh(score)
        return score

    with pytest.raises(ValueError, match=f"derivative of at most {MAX_IN_DERIVATIVE} operations"):
        trace(nested)


@settings(max_examples=100, deadline=None)
@given(expression=expressions())
def test_expressions_survive_json(expression: Expression) -> None:
    again = from_lists(json.loads(json.dumps(to_lists(expression))))
    assert again == expression
    assert hash(again) == hash(expression)
    assert text(again) == text(expression)


@pytest.mark.parametrize("name", MODS)
def test_expressions_compute_what_the_function_does(name: str) -> None:
    rows, columns = torch.arange(6).double()[:, None], torch.arange(7).double()
    score = torch.randn(2, 6, 7, dtype=torch.float64)
    expression = cast(Any, trace(MODS[name]))
    want = MODS[name](score, rows, columns)
    torch.testing.assert_close(on_tensors(expression)(score, rows, columns), want)


def test_every_operation_can_be_traced() -> None:
    def used(expression: Any) -> Iterator[str]:
        if isinstance(expression, tuple):
            yield expression[0]
            for operand in expression[1:]:
                yield from used(operand)

    assert set(used(trace(everything))) == set(OPERANDS)


@pytest.mark.parametrize(
    "data",
    [
        None,
        True,
        "gradient",
        [],
        ["score"],
        ["pow", "score", 2],
        ["neg", "score", 1],
        ["add", "score"],
        ["add", "score", math.nan],
        ["add", "score", 1e39],
        ["add", "score", 10**400],
        ["add", "score", [3, "score"]],
        {"add": 1},
    ],
)
def test_what_is_no_expression_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="no expression of the score"):
        from_lists(data)
    with pytest.raises(ValueError, match="this is no attention spec"):
        AttentionSpec.from_dict(attention().to_dict() | {"score_mod": data})


def test_numbers_of_a_soft_cap_cancel_in_its_derivative() -> None:
    for bound in (3.0, 30.0, 49.0, 50.0):
        found = trace(lambda s, q, k, c=bound: c * torch.tanh(s / c))
        assert list(numbers(derivative(cast(Any, found)))) == [1 / bound] * 2


def test_a_spec_says_what_becomes_of_its_scores() -> None:
    spec = dataclasses.replace(attention(), score_mod=trace(distance))
    assert spec.modified
    wanted = "score_mod=sub(score, mul(log(add(abs(sub(q_index, kv_index)), 1)), 0.25))"
    assert wanted in str(spec)


def test_recorded_calls_come_back(tmp_path: Any) -> None:
    wanted = [
        dataclasses.replace(attention(direction), score_mod=trace(everything))
        for direction in (FORWARD, BACKWARD)
    ]
    path = tmp_path / "calls.jsonl"
    recorder = recording.Recorder(path)
    for spec in wanted:
        recorder.note(spec)
        recorder.note(dataclasses.replace(spec, score_mod=trace(everything)))
    assert recording.read([path]) == wanted


# ------------------------------------------------------------------------------------------ cuDNN


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("name", ["cap", "distance", "everything"])
def test_what_cudnn_plans(name: str, direction: Any, profile: str) -> None:
    for band in ({}, {"left": 20, "right": 5, "slopes": True}):
        spec = attention(direction, lengths=(200, 333), lse=direction is FORWARD)
        spec = dataclasses.replace(spec, score_mod=trace(MODS[name]), softcap=3.0, **band)
        assert refusal(spec, devices.described(profile)) is None


@pytest.mark.parametrize(
    ("profile", "direction"),
    [("h200", FORWARD), ("h200", BACKWARD), ("b200", BACKWARD), ("a100-sxm-80gb", BACKWARD)],
)
def test_cudnn_compiles_every_operation(profile: str, direction: Any) -> None:
    """Forward graphs of other GPUs are a part of what their backward has."""
    spec = attention(direction, lengths=(200, 72), lse=direction is FORWARD)
    spec = dataclasses.replace(spec, score_mod=trace(everything), left=50, causal=True)
    assert compile_plan(spec, devices.described(profile)).engine


# ----------------------------------------------------------------------------------- the fallback


@pytest.mark.parametrize("band", ["left", "causal window", "bottom right both"])
@pytest.mark.parametrize("name", MODS)
def test_fallback(name: str, band: str) -> None:
    options = BAND[band] | {"score_mod": MODS[name]}
    assert_right(qkv(), options)
    assert_right(qkv(), options | SCORES["softcap and alibi"])
    assert_right(qkv(), options | {"seq_lens_q": lens(5, 2, 1), "seq_lens_kv": lens(4, 7, 3)})
    bias = None if options.get("is_causal") else torch.randn(5, 7)
    assert_right([*qkv(), torch.randn(4).requires_grad_()], options, bias)


def test_a_soft_cap_is_one() -> None:
    leaves = qkv()
    got, want = cudnn_sdpa(*leaves, score_mod=cap), cudnn_sdpa(*leaves, softcap=5.0)
    torch.testing.assert_close(got, want)


def test_it_is_what_the_definition_says() -> None:
    """Of scaled scores and whole positions, whatever the alignment."""
    query, key, value = (t[0, :2].detach() for t in qkv(dims=(8, 8)))
    scores = 0.3 * query @ key.mT
    rows, columns = torch.arange(5)[:, None], torch.arange(7)
    visible = columns <= rows + 2
    scores = (scores * (1 + columns) + rows / 4).tanh() * 2
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    got = cudnn_sdpa(
        query,
        key,
        value,
        is_causal=True,
        scale=0.3,
        causal_alignment="bottom_right",
        softcap=2.0,
        score_mod=lambda s, q, k: 2 * (s * (1 + k) + q / 4),
    )
    torch.testing.assert_close(got, weights @ value)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("name", MODS)
def test_gradients_of_the_reference(name: str, softcap: float | None) -> None:
    leaves = qkv()
    options: dict[str, Any] = {"score_mod": MODS[name], "softcap": softcap, "is_causal": True}
    output, lse = reference.attention(*leaves, **options)
    upstream = torch.randn_like(output)
    found = reference.gradients(
        upstream, *(t.detach() for t in leaves), output.detach(), lse.detach(), **options
    )
    wanted = torch.autograd.grad(output, leaves, upstream)
    for got, want in zip(found[:3], wanted, strict=True):
        torch.testing.assert_close(got, want)


# ----------------------------------------------------------------------------------------- routes


@pytest.fixture(params=["h200", "a100-sxm-80gb"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> interpreter.Machine:
    return interpreter.install(monkeypatch, padded, profile=request.param)


@pytest.mark.parametrize("band", ["causal window", "bottom right both"])
@pytest.mark.parametrize("name", MODS)
def test_plans(machine: interpreter.Machine, name: str, band: str) -> None:
    options = BAND[band] | {"score_mod": MODS[name], "fallback": False}
    for gradients, more in itertools.product((True, False), ({}, {"softcap": 1.5, "alibi": True})):
        leaves = qkv(heads=(4, 2, 1), dtype=torch.float16)
        leaves = [*leaves, torch.randn(4).requires_grad_()]
        wanted = options | more | {"enable_gqa": True}
        assert_right(leaves, wanted, gradients=gradients, tolerance=8e-3)
    assert {spec.score_mod for spec in machine.runs} == {trace(MODS[name])}


def test_functions_that_build_the_same_share_a_plan(machine: interpreter.Machine) -> None:
    leaves = [t.detach() for t in qkv(dtype=torch.float16)]

    def attend(bound: float) -> None:
        cudnn_sdpa(*leaves, score_mod=lambda s, q, k: s * bound, fallback=False)

    for bound in (2, 2.0, 3, 2):
        attend(bound)
    assert [spec.score_mod for spec in machine.specs] == [
        ("mul", "score", 2.0),
        ("mul", "score", 3.0),
    ]
    assert len(machine.runs) == 4


@pytest.mark.parametrize("profile", ["h200", "a100-sxm-80gb"])
def test_lengths_beside_it_are_refused(profile: str) -> None:
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    terms = make_terms(False, "top_left", None, None, False, trace(distance))
    found = route(profile, terms=terms, lengths_kv=lengths)
    assert [(reason.rule, reason.kind.value) for reason in found.reasons] == [
        ("score_operations", "wrong")
    ]
    assert "a score_mod is not served beside lengths" in found.reasons[0].message


def test_explained() -> None:
    shape = (2, 4, 128, 64)
    verdict = explain(shape, shape, shape, score_mod=distance, gpu="h200")
    assert verdict.served
    assert "score_mod=sub(score, mul(log(" in verdict.graphs[0].spec
    with pytest.raises(TypeError, match="must not call cos"):
        explain(shape, shape, shape, score_mod=lambda s, q, k: torch.cos(s), gpu="h200")
    refused = explain(shape, shape, shape, score_mod=cap, seq_lens_kv=True, gpu="h200")
    assert [reason.rule for reason in refused.reasons] == ["score_operations"]
    assert "reference" in refused.runs


def test_without_a_fallback_the_reasons_are_raised() -> None:
    with pytest.raises(CudnnSdpaUnsupportedError, match="must be on a CUDA device, got cpu"):
        cudnn_sdpa(*qkv(), score_mod=cap, fallback=False)


def test_compilers_leave_it_alone() -> None:
    query = torch.randn(1, 2, 4, 8)

    def call(given: Tensor) -> Tensor:
        return cudnn_sdpa(given * 2, query, query, score_mod=cap) + 1

    assert torch._dynamo.explain(call)(query).graph_break_count == 1
    torch.testing.assert_close(torch.compile(call, backend="eager")(query), call(query))


LIGHT = """
import sys
import cudnn_mha.spec
assert "torch" not in sys.modules
"""


def test_specs_need_no_pytorch() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"score_mod": ("add", "score", ("mul", "kv_index", 0.5))}, True),
        ({"score_mod": ("add", "score", ("mul", "q_index", 0.5))}, False),
        ({"score_mod": ("tanh", "score"), "left": 9}, True),
        ({"softcap": 3.0}, False),
        ({"softcap": 3.0, "causal": True}, True),
        ({"softcap": 3.0, "left": 40, "bottom_right": True}, True),
        ({"slopes": True}, True),
        ({"left": 40, "bottom_right": True}, False),
        ({"alibi": True, "causal": True}, False),
    ],
)
def test_kernels_for_one_query_count_keys_wrong(fields: dict[str, Any], refused: bool) -> None:
    """So what reads the index of a key is left to PyTorch there, unless it is cuDNN's own mask."""
    h200 = devices.described("h200")
    found = checks.check(attention(lengths=(1, 300), **fields), h200, 91900)
    assert [reason.rule for reason in found] == ["score_operations"] * refused
    assert checks.check(attention(lengths=(2, 300), **fields), h200, 91900) == ()
