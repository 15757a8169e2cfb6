"""What a call may ask for beside its tensors: arguments, and what of them makes a difference."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from cudnn_mha import reference
from cudnn_mha.terms import Terms, make_terms, paper_slopes
from tests.support import attention

SIZES = (1, 2, 3, 4)
BOUNDS = (None, 0, 1, 2, 3, 4, 5)

Seen = dict[tuple[int, int, int, int], int]
"""By lengths, query and key that sees it: the distance that ALiBi counts."""


def seen(terms: Terms, seq_q: int, seq_kv: int, *, lengths: bool) -> Seen:
    """From the definition; with lengths those of every sequence that fits."""
    found = {}
    pairs = itertools.product(range(1, seq_q + 1), range(1, seq_kv + 1))
    for own_q, own_kv in pairs if lengths else ((seq_q, seq_kv),):
        for i, j in itertools.product(range(own_q), range(own_kv)):
            d = i - j + (own_kv - own_q if terms.bottom_right else 0)
            after = terms.right is None or d >= -terms.right
            if after and (terms.left is None or d <= terms.left):
                found[own_q, own_kv, i, j] = abs(d) if terms.alibi else 0
    return found


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_what_makes_no_difference_goes_and_nothing_else(
    bottom_right: bool, alibi: bool, lengths: bool
) -> None:
    for seq_q, seq_kv in itertools.product(SIZES, SIZES):
        for left, right in itertools.product(BOUNDS, BOUNDS):
            terms = Terms(left, right, bottom_right, 2.5, alibi)
            case = terms, seq_q, seq_kv
            kept = terms.within(seq_q, seq_kv, lengths=lengths)
            want = seen(terms, seq_q, seq_kv, lengths=lengths)
            assert seen(kept, seq_q, seq_kv, lengths=lengths) == want, case
            assert (kept.softcap, kept.alibi) == (2.5, alibi)
            for name in ("left", "right"):
                if getattr(kept, name) is not None:
                    assert getattr(kept, name) == getattr(terms, name)
                    without = dataclasses.replace(kept, **{name: None})
                    assert seen(without, seq_q, seq_kv, lengths=lengths) != want, (name, case)
            # A single query and a single key have one distance, which no alignment moves.
            if kept.bottom_right and (seq_q, seq_kv) != (1, 1):
                without = dataclasses.replace(kept, bottom_right=False)
                assert seen(without, seq_q, seq_kv, lengths=lengths) != want, case
            assert kept.bottom_right <= terms.bottom_right
            assert kept.within(seq_q, seq_kv, lengths=lengths) == kept


def test_windows_are_counted_as_the_reference_counts_them() -> None:
    assert Terms().window == (-1, -1)
    assert Terms(3, 0).window == (3, 0)
    assert make_terms(False, "top_left", (-1, 2), None, False).window == (-1, 2)
    assert make_terms(True, "top_left", None, None, False).window == (-1, 0)


@pytest.mark.parametrize(
    ("arguments", "terms"),
    [
        ({}, Terms()),
        ({"is_causal": True}, Terms(None, 0)),
        ({"is_causal": True, "window": (4, 7)}, Terms(4, 0)),
        ({"window": [4, 7]}, Terms(4, 7)),
        ({"window": (-1, 0)}, Terms(None, 0)),
        ({"window": (0, -1)}, Terms(0, None)),
        ({"causal_alignment": "bottom_right"}, Terms(bottom_right=True)),
        ({"softcap": 0}, Terms()),
        ({"softcap": 30}, Terms(softcap=30.0)),
        ({"alibi": True}, Terms(alibi=True)),
    ],
)
def test_arguments(arguments: dict[str, Any], terms: Terms) -> None:
    given = {"is_causal": False, "causal_alignment": "top_left", "window": None}
    given |= {"softcap": None, "alibi": False}
    found = make_terms(**(given | arguments))
    assert found == terms
    assert type(found.softcap) is float


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"causal_alignment": "left"}, ValueError, "causal_alignment must be one of top_left, bo"),
        ({"causal_alignment": None}, ValueError, "causal_alignment must be one of .* got None"),
        ({"alibi": 1}, TypeError, "alibi must be True or False, got 1"),
        ({"window": 3}, TypeError, r"window must be \(left, right\), .* got 3"),
        ({"window": (1,)}, TypeError, r"window must be .* got \(1,\)"),
        ({"window": (1, 2, 3)}, TypeError, r"window must be .* got \(1, 2, 3\)"),
        ({"window": (1.0, 2)}, TypeError, r"window must be .* got \(1.0, 2\)"),
        ({"window": (True, 2)}, TypeError, r"window must be .* got \(True, 2\)"),
        ({"window": (1, None)}, TypeError, r"window must be .* got \(1, None\)"),
        ({"window": (-2, 1)}, ValueError, r"window must hold -1 .* got \(-2, 1\)"),
        ({"softcap": "3"}, TypeError, "softcap must be a number or None, got '3'"),
        ({"softcap": True}, TypeError, "softcap must be a number or None, got True"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive, .* got -1.0"),
        ({"softcap": math.inf}, ValueError, "softcap must be positive, .* got inf"),
        ({"softcap": math.nan}, ValueError, "softcap must be positive, .* got nan"),
        ({"softcap": 1e39}, ValueError, r"softcap must be positive, .* got 1e\+39"),
        ({"softcap": 1e-39}, ValueError, "softcap must be positive, .* reciprocal .* got 1e-39"),
        ({"softcap": 10**400}, ValueError, "softcap must be positive, .* got 1000"),
    ],
)
def test_arguments_that_mean_nothing(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"is_causal": False, "causal_alignment": "top_left", "window": None}
    given |= {"softcap": None, "alibi": False}
    with pytest.raises(error, match=f"^{message}"):
        make_terms(**(given | arguments))


APPLIED: list[tuple[Terms, bool, dict[str, Any]]] = [
    (Terms(), False, {}),
    (Terms(None, 0), False, {"causal": True}),
    (Terms(3, 0), False, {"causal": True, "left": 3}),
    (Terms(0, 2, True), False, {"left": 0, "right": 2, "bottom_right": True}),
    (Terms(softcap=5.0), False, {"softcap": 5.0}),
    (Terms(score_mod=("neg", "score")), False, {"score_mod": ("neg", "score")}),
    (
        Terms(None, 0, alibi=True, score_mod=("neg", "score")),
        False,
        {"causal": True, "score_mod": ("neg", "score"), "slopes": True},
    ),
    (Terms(None, 0, alibi=True), False, {"causal": True, "alibi": True}),
    (Terms(2, 0, alibi=True), False, {"causal": True, "left": 2, "alibi": True}),
    # cuDNN's own mask has neither slopes of the caller's, nor a key to the right, nor a cap.
    (Terms(None, 0, alibi=True), True, {"causal": True, "slopes": True}),
    (Terms(alibi=True), False, {"slopes": True}),
    (Terms(None, 1, alibi=True), False, {"right": 1, "slopes": True}),
    (
        Terms(None, 0, True, alibi=True),
        False,
        {"causal": True, "bottom_right": True, "slopes": True},
    ),
    (
        Terms(None, 0, softcap=5.0, alibi=True),
        False,
        {"causal": True, "softcap": 5.0, "slopes": True},
    ),
]


@pytest.mark.parametrize(("terms", "slopes", "fields"), APPLIED)
def test_terms_in_a_spec(terms: Terms, slopes: bool, fields: dict[str, Any]) -> None:
    spec = attention(lse=True)
    applied = terms.applied(spec, slopes=slopes)
    assert applied == dataclasses.replace(spec, **fields)
    assert applied.modified == bool({"softcap", "score_mod", "slopes"} & fields.keys())
    assert applied.banded == bool({"causal", "left", "right"} & fields.keys())


def test_terms_replace_what_a_spec_says_of_causality() -> None:
    assert not Terms().applied(attention(causal=True), slopes=False).causal


def test_slopes_are_the_papers_for_any_number_of_heads() -> None:
    for heads in range(1, 70):
        assert paper_slopes(heads) == pytest.approx(reference.alibi_slopes(heads).tolist())
    assert paper_slopes(8) == [2.0**-k for k in range(1, 9)]
    assert paper_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]
    assert paper_slopes(0) == []
