"""What the builder puts into a graph, read back from the graph itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cudnn_mha import devices, runtime
from cudnn_mha.checks import check, remedied
from cudnn_mha.graph_builder import Uid, build_graph, lse_layout, operands
from cudnn_mha.spec import AttentionSpec, TensorSpec
from tests.support import BACKWARD, BSHD, FORWARD, PROFILES, attention, planned, tensor

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


def layouts_in(graph: Any) -> dict[Uid, TensorSpec]:
    """Every tensor of the graph that has memory, by id."""
    names = {
        "data_type.HALF": "float16",
        "data_type.BFLOAT16": "bfloat16",
        "data_type.FLOAT": "float32",
        "data_type.INT32": "int32",
        "data_type.INT64": "int64",
    }
    return {
        Uid(t["uid"]): TensorSpec(tuple(t["dim"]), tuple(t["stride"]), names[str(t["dtype"])])
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
    lowered = planned(spec, H200)._lowered_graph
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
    graph = planned(spec, device)
    assert any(plan.cpp_index is not None for plan in graph.plans)


def test_the_described_device_decides() -> None:
    """Engines of one architecture are not proposed for another."""
    spec = attention(BACKWARD, dims=(256, 256))
    assert planned(spec, H200).plans
    unsupported = runtime.library().cudnnGraphNotSupportedError
    with pytest.raises(unsupported, match="less than or equal to 128"):
        planned(spec, devices.described("l40s"))


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
