"""What the builder puts into a graph, read back from the graph itself."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import devices, reference, runtime
from cudnn_mha.checks import check, remedied
from cudnn_mha.graph_builder import (
    FIRST_NUMBER,
    Uid,
    _Nodes,
    build_graph,
    constants,
    lse_layout,
    operands,
    propose_plans,
)
from cudnn_mha.sequences import ragged
from cudnn_mha.spec import AttentionSpec, Direction, TensorSpec
from tests.support import BACKWARD, BSHD, FORWARD, PROFILES, attention, refusal, tensor

H200 = devices.described("h200")

SCORES = (2, 4, 128, 256)
SIZES: dict[str, Any] = {"heads": (4, 2, 1), "lengths": (128, 256), "dims": (64, 32)}
BIAS = TensorSpec(SCORES, (0, 256, 0, 1), "float32")
GRAD_OUTPUT = TensorSpec((2, 4, 128, 32), (16384, 32, 128, 1), "float16")

# Every option alone, then all that go together.
FORWARDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"lse": True},
    "causal": {"causal": True},
    "bias": {"bias": BIAS},
    "dropout": {"dropout_p": 0.25},
    "padding": {"padding": True},
    "all": {"lse": True, "causal": True, "bias": BIAS, "dropout_p": 0.25, "padding": True},
}
BACKWARDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "bias": {"bias": BIAS},
    "grad_bias": {"bias": BIAS, "grad_bias": tensor(SCORES)},
    "dropout": {"dropout_p": 0.25},
    "padding": {"padding": True},
    "deterministic": {"deterministic": True},
    "grad_output": {"grad_output": GRAD_OUTPUT},
    "all": {
        "causal": True,
        "bias": BIAS,
        "grad_bias": tensor(SCORES),
        "dropout_p": 0.25,
        "padding": True,
        "deterministic": True,
    },
}
SPECS = {f"forward-{k}": attention(FORWARD, **SIZES, **v) for k, v in FORWARDS.items()}
SPECS |= {f"backward-{k}": attention(BACKWARD, **SIZES, **v) for k, v in BACKWARDS.items()}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def layouts_in(graph: Any) -> dict[int, TensorSpec]:
    """Every tensor of the graph that has memory, by id."""
    names = {
        "data_type.HALF": "float16",
        "data_type.BFLOAT16": "bfloat16",
        "data_type.FLOAT": "float32",
        "data_type.INT32": "int32",
        "data_type.INT64": "int64",
    }
    return {
        t["uid"]: TensorSpec(tuple(t["dim"]), tuple(t["stride"]), names[str(t["dtype"])])
        for t in graph.inspect()["tensors"].values()
        if not t["is_virtual"]
    }


def node_in(graph: Any) -> dict[str, Any]:
    (node,) = graph.inspect()["nodes"]
    found: dict[str, Any] = node
    return found


def expected_layouts(spec: AttentionSpec) -> dict[Uid, TensorSpec]:
    scalar = TensorSpec((1, 1, 1, 1), (1, 1, 1, 1), "int64")
    lengths = TensorSpec((2, 1, 1, 1), (1, 1, 1, 1), "int32")
    found = {Uid[name.upper()]: layout for name, layout in spec.tensors.items()}
    if spec.lse or spec.backward:
        found[Uid.LSE] = TensorSpec((2, 4, 128, 1), (512, 128, 1, 1), "float32")
    if spec.dropout_p:
        found |= {Uid.DROPOUT_SEED: scalar, Uid.DROPOUT_OFFSET: scalar}
    if spec.padding:
        found |= {Uid.SEQ_LEN_Q: lengths, Uid.SEQ_LEN_KV: lengths}
    return found


def expected_params(spec: AttentionSpec) -> dict[str, Any]:
    cudnn = runtime.library()
    found: dict[str, Any] = {"attn_scale": 0.125}
    if spec.causal:
        found["diagonal_alignment"] = cudnn.diagonal_alignment.TOP_LEFT
        found["diagonal_band_right_bound"] = 0
    if spec.dropout_p:
        found["dropout_0"] = 0.25
    if spec.padding:
        found["use_padding_mask"] = True
    if spec.deterministic:
        found["use_deterministic_algorithm"] = True
    if not spec.backward:
        found["generate_stats"] = spec.lse
    return found


@every_spec
def test_operands_have_the_layouts_of_the_spec(spec: AttentionSpec) -> None:
    assert layouts_in(build_graph(spec, H200)) == expected_layouts(spec)


@every_spec
def test_the_node_has_the_options_of_the_spec_and_no_others(spec: AttentionSpec) -> None:
    node = node_in(build_graph(spec, H200))
    assert node["type"] == ("SDPA_BWD" if spec.backward else "SDPA")
    params = {k: v for k, v in node["params"].items() if not k.startswith("_")}
    assert params == expected_params(spec)


@every_spec
def test_every_operand_is_wired_to_its_own_place(spec: AttentionSpec) -> None:
    node = node_in(build_graph(spec, H200))
    inputs = {"q": "query", "k": "key", "v": "value"}
    if spec.backward:
        inputs |= {"o": "output", "dO": "grad_output", "stats": "lse"}
        outputs = {"dQ": "grad_query", "dK": "grad_key", "dV": "grad_value"}
        outputs |= {"dBias": "grad_bias"} if spec.grad_bias else {}
    else:
        outputs = {"O": "output"} | ({"Stats": "lse"} if spec.lse else {})
    if spec.bias:
        inputs["bias"] = "bias"
    if spec.padding:
        inputs |= {"seq_len_q": "seq_len_q", "seq_len_kv": "seq_len_kv"}
    if spec.dropout_p:
        inputs |= {"dropout_1": "dropout_seed", "dropout_2": "dropout_offset"}
    assert node["inputs"] == inputs
    assert node["outputs"] == outputs


@every_spec
def test_operands_are_in_cudnn_s_own_order(spec: AttentionSpec) -> None:
    lowered = propose_plans(spec, H200)._lowered_graph
    lowered._prepare_variant_pack_template()
    assert tuple(lowered._get_variant_pack_uids_sorted()) == operands(spec)


def test_the_types_of_the_arithmetic() -> None:
    context = build_graph(attention(dtype="bfloat16"), H200).inspect()["context"]
    assert context["io_data_type"] == "data_type.BFLOAT16"
    assert context["compute_data_type"] == "data_type.FLOAT"


def test_scale_reaches_the_graph_exactly() -> None:
    for scale in (0.0, 1.0, 0.1234567891234):
        for direction in (FORWARD, BACKWARD):
            node = node_in(build_graph(attention(direction, scale=scale), H200))
            assert node["params"]["attn_scale"] == scale


@pytest.mark.parametrize("order", [(0, 1, 2, 3), BSHD, (2, 0, 1, 3)])
def test_log_sum_exp_is_packed_whatever_the_layout(order: tuple[int, ...]) -> None:
    spec = attention(lengths=(7, 9), order=order, lse=True)
    assert lse_layout(spec) == TensorSpec((2, 4, 7, 1), (28, 7, 1, 1), "float32")


def test_a_graph_that_cudnn_has_not_is_refused_in_its_words() -> None:
    unsupported = runtime.library().cudnnGraphNotSupportedError
    with pytest.raises(unsupported, match="multiple of 8"):
        build_graph(attention(dims=(20, 20)), H200)


# What every GPU generation must plan.
COMMON: dict[str, AttentionSpec] = {
    "bshd-causal-lse": attention(order=BSHD, causal=True, lse=True),
    "bfloat16-gqa": attention(heads=(8, 2, 2), dtype="bfloat16"),
    "heads-kv-differ": attention(heads=(8, 2, 4)),
    "odd-lengths": attention(lengths=(777, 65), lse=True),
    "one-key": attention(lengths=(128, 1)),
    "wide-heads": attention(dims=(256, 256)),
    "dims-differ": attention(dims=(192, 128)),
    "bias-dropout": attention(bias=tensor((1, 4, 128, 128), "float32"), dropout_p=0.5, lse=True),
    "bias-repeated": attention(bias=TensorSpec((2, 1, 128, 128), (128, 128, 0, 1), "float16")),
    "backward-causal": attention(BACKWARD, causal=True, order=BSHD),
    "backward-gqa": attention(BACKWARD, heads=(8, 2, 4), dtype="bfloat16"),
    "backward-tail": attention(BACKWARD, lengths=(777, 65)),
    "backward-grad-bias": attention(
        BACKWARD, bias=tensor((2, 4, 128, 128)), grad_bias=tensor((2, 4, 128, 128))
    ),
    "backward-grad-bias-repeated": attention(
        BACKWARD,
        bias=TensorSpec((1, 1, 128, 128), (128, 128, 0, 1), "float32"),
        grad_bias=tensor((1, 1, 128, 128)),
    ),
    "backward-dropout": attention(BACKWARD, dropout_p=0.5, bias=tensor((1, 1, 128, 128))),
    "backward-deterministic": attention(BACKWARD, deterministic=True),
    "backward-repeated-query": attention(
        BACKWARD, query=TensorSpec((2, 4, 128, 64), (0, 64, 256, 1), "float16")
    ),
}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("spec", COMMON.values(), ids=COMMON.keys())
def test_every_gpu_plans_the_common_calls(spec: AttentionSpec, profile: str) -> None:
    device = devices.described(profile)
    spec = remedied(spec, device)
    assert check(spec, device, runtime.cudnn_version()) == ()
    graph = propose_plans(spec, device)
    assert any(plan.cpp_index is not None for plan in graph.plans)


def test_the_described_device_decides() -> None:
    """Engines of one architecture are not proposed for another."""
    spec = attention(BACKWARD, dims=(256, 256))
    assert propose_plans(spec, H200).plans
    unsupported = runtime.library().cudnnGraphNotSupportedError
    with pytest.raises(unsupported, match="less than or equal to 128"):
        propose_plans(spec, devices.described("l40s"))


def test_specs_of_the_table_differ_in_one_thing_each() -> None:
    """The tables above would prove little if an option were lost on the way into a spec."""
    plain = SPECS["backward-plain"]
    for name in ("causal", "dropout", "padding", "deterministic", "grad_output"):
        spec = SPECS[f"backward-{name}"]
        changed = [
            field.name
            for field in dataclasses.fields(spec)
            if field.compare and getattr(spec, field.name) != getattr(plain, field.name)
        ]
        assert changed == ["dropout_p" if name == "dropout" else name]


# ----------------------------------------------------------- what PyTorch's function cannot say

BY_HEAD = TensorSpec((1, 4, 1, 1), (4, 1, 1, 1), "float32")
ONE = TensorSpec((1, 1, 1, 1), (1, 1, 1, 1), "float32")
ONE_INT = ONE._replace(dtype="int32")
LENGTHS = TensorSpec((2, 1, 1, 1), (1, 1, 1, 1), "int32")
OFFSETS = TensorSpec((3, 1, 1, 1), (1, 1, 1, 1), "int64")
TABLE = TensorSpec((2, 1, 4, 1), (4, 4, 1, 1), "int32")
FIRST, SECOND = FIRST_NUMBER, FIRST_NUMBER + 1
RISING: Any = ("add", "score", ("mul", "kv_index", 0.5))
TELLS: dict[str, tuple[dict[str, Any], dict[int, TensorSpec]]] = {
    "window": ({"left": 3, "right": 5}, {}),
    "bottom right": ({"causal": True, "bottom_right": True}, {}),
    "alibi": ({"alibi": True, "causal": True}, {}),
    "sinks": ({"sinks": True}, {Uid.SINKS: BY_HEAD}),
    "lengths": ({"lengths": True}, {Uid.SEQ_LEN_Q: LENGTHS, Uid.SEQ_LEN_KV: LENGTHS}),
    "softcap": ({"softcap": 5.0}, {FIRST: ONE, SECOND: ONE}),
    "score mod": ({"score_mod": RISING}, {FIRST: ONE}),
    "capped score mod": (
        {"score_mod": RISING, "softcap": 0.5},  # of which 0.5 serves both
        {FIRST: ONE, SECOND: ONE},
    ),
    "slopes": ({"slopes": True}, {Uid.SLOPES: BY_HEAD}),
    "bottom right slopes": (
        {"slopes": True, "bottom_right": True},
        {Uid.SLOPES: BY_HEAD, Uid.SHIFT: ONE_INT},
    ),
    "banded softcap": (
        {"softcap": 5.0, "left": 3, "causal": True},
        {
            FIRST: ONE,
            SECOND: ONE,
            Uid.FIRST: ONE_INT,
            Uid.MINUS_INFINITY_FIRST: ONE,
            Uid.MINUS_INFINITY_LAST: ONE,
        },
    ),
}


def featured(direction: Direction, **fields: Any) -> AttentionSpec:
    return dataclasses.replace(attention(direction, **SIZES), **fields)


@pytest.mark.parametrize("name", TELLS)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_operands_of_every_feature(direction: Direction, name: str) -> None:
    fields, more = TELLS[name]
    if direction is FORWARD:
        fields = fields | {"lse": True}
    spec = featured(direction, **fields)
    graph = propose_plans(spec, H200)
    lowered = graph._lowered_graph
    lowered._prepare_variant_pack_template()
    plain = attention(direction, **SIZES, lse=direction is FORWARD)
    if spec.backward and spec.sinks:  # which are in the log-sum-exp
        more = {}
    if spec.backward and spec.score_mod:  # and the lowest score that one is taken for
        more = more | {FIRST_NUMBER + len(more): ONE}
    want = sorted({*operands(plain), *more})
    assert list(operands(spec)) == want
    assert list(lowered._get_variant_pack_uids_sorted()) == want
    found = {uid: layout for uid, (layout, _) in constants(spec).items()}
    assert found == {uid: more[uid] for uid in found}
    given = [uid for uid in more if uid not in found]
    assert all(uid in GIVEN for uid in given)
    assert not set(found) & GIVEN
    node = layouts_in(graph)
    assert {uid: node[uid] for uid in more if uid in node} == {
        uid: layout for uid, layout in more.items() if uid in node
    }


GIVEN = {Uid.SINKS, Uid.SEQ_LEN_Q, Uid.SEQ_LEN_KV, Uid.SLOPES}


def test_the_gradient_of_sinks_takes_them() -> None:
    spec = featured(BACKWARD, sinks=True, grad_sinks=True)
    found = layouts_in(build_graph(spec, H200))
    assert found[Uid.SINKS] == found[Uid.GRAD_SINKS] == BY_HEAD
    assert list(operands(spec)) == sorted(found)
    assert node_in(build_graph(spec, H200))["inputs"]["sink_token"] == "sinks"


def test_constants_have_the_values_of_the_spec() -> None:
    def values(direction: Direction = FORWARD, **fields: Any) -> dict[str | int, float]:
        found = constants(featured(direction, **fields))
        numbers = FIRST_NUMBER
        return {
            Uid(uid).name if uid < numbers else uid - numbers: value
            for uid, (_, value) in found.items()
        }

    assert values() == values(lengths=True) == values(causal=True) == {}
    assert values(padding=True) == {"SEQ_LEN_Q": 128, "SEQ_LEN_KV": 256}
    assert values(softcap=4.0) == values(BACKWARD, softcap=4.0) == {0: 0.25, 1: 4.0}
    assert values(score_mod=RISING, softcap=0.5) == {0: 0.5, 1: 2.0}
    cubed: Any = ("mul", ("mul", ("abs", "score"), "score"), 3.0)
    assert values(score_mod=cubed) == {0: 1.0, 1: 3.0}  # a copy of the scores stands second
    assert values(BACKWARD, score_mod=cubed) == {0: -1e9, 1: 3.0, 2: 2.0**-120}
    torn = featured(BACKWARD, score_mod=RISING, query=tensor((2, 4, 5, 64)))
    numbers = [value for uid, (_, value) in constants(torn).items() if uid >= FIRST_NUMBER]
    assert numbers == [-1e9, 0.5, 4.5, 1e30]
    infinite = {"MINUS_INFINITY_FIRST": -math.inf, "MINUS_INFINITY_LAST": -math.inf}
    band: dict[str, Any] = {"slopes": True, "left": 3, "right": 5}
    assert values(**band) == {"FIRST": 3, "LAST": 5} | infinite
    assert values(**band, bottom_right=True) == {"FIRST": 125, "LAST": 133, "SHIFT": 128} | infinite


def test_ragged_tensors_know_their_offsets() -> None:
    spec = ragged(attention(BACKWARD, **SIZES, order=BSHD), 128, 256)
    found = layouts_in(build_graph(spec, H200))
    offsets = {uid for uid in found if Uid(uid).name.startswith("OFFSET")}
    assert offsets == {uid for uid in Uid if uid.name.startswith("OFFSET")}
    assert {found[uid] for uid in offsets} == {OFFSETS}
    assert found[Uid.LSE] == TensorSpec((2, 4, 128, 1), (512, 1, 4, 1), "float32")
    assert found[Uid.SEQ_LEN_Q] == LENGTHS
    assert node_in(build_graph(spec, H200))["params"]["use_padding_mask"] is True


def test_pages_have_a_table() -> None:
    pool = tensor((40, 2, 64, 64))
    spec = attention(heads=(4, 2, 2), key=pool, value=pool)
    spec = dataclasses.replace(spec, lengths=True, page_table=TABLE)
    node = node_in(build_graph(spec, H200))
    assert node["params"]["paged_attention_max_seq_len_kv"] == 256
    found = layouts_in(build_graph(spec, H200))
    assert found[Uid.PAGE_TABLE_KEY] == found[Uid.PAGE_TABLE_VALUE] == TABLE
    assert found[Uid.KEY] == pool
    assert list(operands(spec)) == sorted(found)


def test_bands_are_counted_with_the_diagonal_on_the_left() -> None:
    params = node_in(build_graph(attention(left=3, right=5, bottom_right=True), H200))["params"]
    alignments = runtime.library().diagonal_alignment
    assert params["diagonal_band_left_bound"] == 4
    assert params["diagonal_band_right_bound"] == 5
    assert params["diagonal_alignment"] == alignments.BOTTOM_RIGHT
    params = node_in(build_graph(attention(left=0, causal=True), H200))["params"]
    assert (params["diagonal_band_left_bound"], params["diagonal_band_right_bound"]) == (1, 0)
    assert params["diagonal_alignment"] == alignments.TOP_LEFT
    params = node_in(build_graph(attention(alibi=True, causal=True), H200))["params"]
    assert params["use_alibi_mask"] is True


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", TELLS)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_what_cudnn_plans(direction: Direction, name: str, profile: str) -> None:
    spec = featured(direction, **TELLS[name][0])
    assert refusal(spec, devices.described(profile)) is None


# ------------------------------------------- operations on the scores, by a graph that computes


class Number:
    """A tensor of a graph that computes at once."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def set_data_type(self, dtype: Any) -> Number:
        """What is an index in the graph is one here: cuDNN's are unsigned."""
        if dtype == runtime.library().data_type.FLOAT:
            self.value = self.value.float()
        if dtype == runtime.library().data_type.INT32:
            assert not self.value.is_floating_point()
            assert (self.value >= 0).all() and (self.value < 2**31).all()
        return self


class Computing:
    """The operations that the builder uses, on PyTorch's tensors."""

    def mul(self, a: Number, b: Number) -> Number:
        return Number(a.value * b.value)

    def div(self, a: Number, b: Number) -> Number:
        assert b.value.dim() == a.value.dim()
        return Number(a.value / b.value)

    def max(self, input0: Number, input1: Number) -> Number:
        return Number(torch.maximum(input0.value, input1.value))

    def min(self, input0: Number, input1: Number) -> Number:
        return Number(torch.minimum(input0.value, input1.value))

    def tanh(self, input: Number) -> Number:
        return Number(input.value.tanh())

    def log(self, input: Number) -> Number:
        return Number(input.value.log())

    def identity(self, input: Number) -> Number:
        return Number(input.value)

    def neg(self, input: Number) -> Number:
        return Number(-input.value)

    def gen_index(self, input: Number, axis: int) -> Number:
        shape = [1, 1, 1, 1]
        shape[axis] = -1
        return Number(torch.arange(input.value.shape[axis]).view(shape).expand(input.value.shape))

    def add(self, a: Number, b: Number) -> Number:
        return Number(a.value + b.value)

    def sub(self, a: Number, b: Number) -> Number:
        return Number(a.value - b.value)

    def abs(self, input: Number) -> Number:
        return Number(input.value.abs())

    def cmp_ge(self, input: Number, comparison: Number) -> Number:
        return Number(input.value >= comparison.value)

    def cmp_lt(self, input: Number, comparison: Number) -> Number:
        return Number(input.value < comparison.value)

    def binary_select(self, input0: Number, input1: Number, mask: Number) -> Number:
        return Number(torch.where(mask.value, input0.value, input1.value))


def modified(
    spec: AttentionSpec, scores: Tensor, given: dict[int, Tensor], gradient: Tensor | None = None
) -> Tensor:
    """What the graph of ``spec`` makes of scaled scores, or of the gradient that arrives there."""
    nodes: Any = object.__new__(_Nodes)
    nodes.spec = spec
    known = dict(given)
    for uid, (layout, value) in constants(spec).items():
        known[uid] = torch.full(layout.shape, value, dtype=getattr(torch, layout.dtype))
    used = set()

    def tensor_of(uid: int, layout: TensorSpec) -> Number:
        used.add(uid)
        assert tuple(known[uid].shape) == layout.shape
        return Number(known[uid])

    nodes._tensor = tensor_of
    result: Number = nodes._modified(Computing(), Number(scores))
    if gradient is not None:
        result = nodes._modified_backward(Computing(), Number(gradient))
    assert used == set(known)
    return result.value


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"softcap": 2.0},
        {"slopes": True},
        {"score_mod": RISING},
        {"score_mod": RISING, "softcap": 3.0},
    ],
    ids=str,
)
def test_scores_are_modified_as_defined(fields: dict[str, Any], bottom_right: bool) -> None:
    torch.manual_seed(0)
    for seq_q, seq_kv in ((3, 5), (5, 3), (4, 4), (1, 3)):
        for left, right in itertools.product((None, 0, 1, 3, 6), (None, 0, 1, 3, 6)):
            band = {"left": left, "right": right or None, "causal": right == 0}
            band["bottom_right"] = bottom_right
            spec = attention(lengths=(seq_q, seq_kv), **fields, **band)
            products = torch.randn(2, 4, seq_q, seq_kv)
            given: dict[int, Tensor] = {}
            slopes = torch.rand(4)
            if spec.slopes:
                given[Uid.SLOPES] = slopes.view(1, 4, 1, 1)
            got = modified(spec, products, given)
            scoring = reference._Scoring(
                products.shape,
                products.device,
                None,
                False,
                None,
                None,
                bottom_right,
                (-1 if left is None else left, -1 if right is None else right),
                spec.softcap or None,
                slopes if spec.slopes else None,
                (lambda score, q, kv: score + 0.5 * kv) if spec.score_mod else None,
            )
            want = scoring.scores(products)
            torch.testing.assert_close(got, want, msg=f"{seq_q} {seq_kv} {band}")


def test_gradients_of_scores_go_back_through_the_operations() -> None:
    torch.manual_seed(0)
    squared: Any = ("mul", ("tanh", "score"), ("add", ("abs", "score"), ("mul", "q_index", 0.5)))

    def softened(score: Tensor) -> Tensor:
        rows = torch.arange(5)[:, None]
        return 3 * torch.tanh(score.tanh() * (score.abs() + 0.5 * rows) / 3)

    spec = attention(BACKWARD, lengths=(5, 7), score_mod=squared, softcap=3.0, causal=True)
    products, upstream = torch.randn(2, 2, 4, 5, 7).unbind()
    got = modified(spec, products, {}, upstream)
    leaf = products.clone().requires_grad_()
    (want,) = torch.autograd.grad(softened(leaf), leaf, upstream)
    torch.testing.assert_close(got, want)


def test_what_lies_beyond_the_last_query_and_key_is_finite_and_weighs_nothing() -> None:
    """As kernels see it, whose tiles are larger than the scores."""
    log: Any = ("log", ("add", ("neg", "kv_index"), 7.0))
    of_q: Any = ("log", ("add", ("neg", "q_index"), 5.0))
    mod: Any = ("mul", ("add", "score", -100.0), ("add", ("mul", log, of_q), 1.0))
    spec = attention(BACKWARD, lengths=(5, 7), score_mod=mod)
    tile, upstream = torch.zeros(2, 4, 8, 16), torch.ones(2, 4, 8, 16)
    beyond = torch.ones(8, 16, dtype=torch.bool)
    beyond[:5, :7] = False
    tile[..., beyond] = torch.tensor([0.0, -torch.inf]).repeat(47)[: int(beyond.sum())]
    scores, gradient = modified(spec, tile, {}), modified(spec, tile, {}, upstream)
    assert (scores[..., beyond] < -1e29).all()
    assert gradient.isfinite().all()
    rows, columns = torch.arange(5.0)[:, None], torch.arange(7.0)
    slope = torch.log(7 - columns) * torch.log(5 - rows) + 1
    torch.testing.assert_close(scores[0, 0, :5, :7], -100 * slope)
    torch.testing.assert_close(gradient[0, 0, :5, :7], slope)
