"""From an `AttentionSpec` to a cuDNN operation graph.

The builder sees the spec and the device and nothing else, so whatever it puts into a graph is in
the plan cache's key. Tensors carry fixed ids (`Uid`), by which a plan finds its operands.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from cudnn_mha import runtime
from cudnn_mha.devices import Device
from cudnn_mha.spec import AttentionSpec, TensorSpec, contiguous_stride


class Uid(IntEnum):
    """Ids of the graph's operands, the same in every graph."""

    QUERY = 1
    KEY = 2
    VALUE = 3
    OUTPUT = 4
    LSE = 5
    BIAS = 6
    DROPOUT_SEED = 7
    DROPOUT_OFFSET = 8
    SEQ_LEN_Q = 9
    SEQ_LEN_KV = 10
    GRAD_OUTPUT = 11
    GRAD_QUERY = 12
    GRAD_KEY = 13
    GRAD_VALUE = 14
    GRAD_BIAS = 15


def operands(spec: AttentionSpec) -> tuple[Uid, ...]:
    """The ids that a graph of ``spec`` takes, in ascending order."""
    present = {
        Uid.QUERY: True,
        Uid.KEY: True,
        Uid.VALUE: True,
        Uid.OUTPUT: True,
        Uid.LSE: spec.lse or spec.backward,
        Uid.BIAS: spec.bias is not None,
        Uid.DROPOUT_SEED: spec.dropout_p > 0,
        Uid.DROPOUT_OFFSET: spec.dropout_p > 0,
        Uid.SEQ_LEN_Q: spec.padding,
        Uid.SEQ_LEN_KV: spec.padding,
        Uid.GRAD_OUTPUT: spec.backward,
        Uid.GRAD_QUERY: spec.backward,
        Uid.GRAD_KEY: spec.backward,
        Uid.GRAD_VALUE: spec.backward,
        Uid.GRAD_BIAS: spec.grad_bias is not None,
    }
    return tuple(uid for uid, used in present.items() if used)


def build_graph(spec: AttentionSpec, device: Device) -> Any:
    """The validated operation graph of ``spec`` for ``device``, no plan made yet.

    Raises:
        cudnn.cudnnGraphNotSupportedError: cuDNN has no such graph.
    """
    cudnn = runtime.library()
    where: dict[str, Any]
    if device.index is None:
        where = {
            "device_property": cudnn.create_device_properties(device.properties),
            "sm_version": device.sm,
        }
    else:
        stream = runtime.current_stream(device.index)
        where = {"handle": runtime.lease(device.index, stream).handle}
    graph = cudnn.pygraph(
        name=f"sdpa_{spec.direction.value}",
        io_data_type=_dtype(spec.query.dtype),
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **where,
    )
    _Nodes(graph, spec).add()
    graph.validate()
    graph.build_operation_graph()
    return graph


class _Nodes:
    """The tensors and the one attention node of a graph."""

    def __init__(self, graph: Any, spec: AttentionSpec) -> None:
        self.graph = graph
        self.spec = spec

    def add(self) -> None:
        if self.spec.backward:
            self._add_backward()
        else:
            self._add_forward()

    def _add_forward(self) -> None:
        spec = self.spec
        output, lse = self.graph.sdpa(
            **self._common(),
            generate_stats=spec.lse,
        )
        self._output(output, Uid.OUTPUT, spec.output)
        if spec.lse:
            self._output(lse, Uid.LSE, lse_layout(spec))

    def _add_backward(self) -> None:
        spec = self.spec
        assert spec.grad_output and spec.grad_query and spec.grad_key and spec.grad_value
        options: dict[str, Any] = {}
        if spec.deterministic:
            options["use_deterministic_algorithm"] = True
        if spec.grad_bias is not None:
            options["dBias"] = self._tensor(Uid.GRAD_BIAS, spec.grad_bias)
        gradients = self.graph.sdpa_backward(
            **self._common(),
            o=self._tensor(Uid.OUTPUT, spec.output),
            dO=self._tensor(Uid.GRAD_OUTPUT, spec.grad_output),
            stats=self._tensor(Uid.LSE, lse_layout(spec)),
            **options,
        )
        layouts = (spec.grad_query, spec.grad_key, spec.grad_value)
        uids = (Uid.GRAD_QUERY, Uid.GRAD_KEY, Uid.GRAD_VALUE)
        for gradient, uid, layout in zip(gradients, uids, layouts, strict=True):
            self._output(gradient, uid, layout)

    def _common(self) -> dict[str, Any]:
        """What the forward and the backward node share."""
        spec = self.spec
        options: dict[str, Any] = {
            "name": "sdpa",
            "q": self._tensor(Uid.QUERY, spec.query),
            "k": self._tensor(Uid.KEY, spec.key),
            "v": self._tensor(Uid.VALUE, spec.value),
            "attn_scale": spec.scale,
        }
        if spec.bias is not None:
            options["bias"] = self._tensor(Uid.BIAS, spec.bias)
        if spec.causal:
            options["diagonal_alignment"] = runtime.library().diagonal_alignment.TOP_LEFT
            options["diagonal_band_right_bound"] = 0
        if spec.padding:
            lengths = TensorSpec((spec.batch, 1, 1, 1), (1, 1, 1, 1), "int32")
            options["use_padding_mask"] = True
            options["seq_len_q"] = self._tensor(Uid.SEQ_LEN_Q, lengths)
            options["seq_len_kv"] = self._tensor(Uid.SEQ_LEN_KV, lengths)
        if spec.dropout_p > 0:
            scalar = TensorSpec((1, 1, 1, 1), (1, 1, 1, 1), "int64")
            options["dropout"] = (
                spec.dropout_p,
                self._tensor(Uid.DROPOUT_SEED, scalar),
                self._tensor(Uid.DROPOUT_OFFSET, scalar),
            )
        return options

    def _tensor(self, uid: Uid, layout: TensorSpec) -> Any:
        return self.graph.tensor(
            name=uid.name.lower(),
            uid=int(uid),
            dim=list(layout.shape),
            stride=list(layout.stride),
            data_type=_dtype(layout.dtype),
        )

    def _output(self, tensor: Any, uid: Uid, layout: TensorSpec) -> None:
        tensor.set_output(True).set_uid(int(uid)).set_name(uid.name.lower())
        tensor.set_dim(list(layout.shape)).set_stride(list(layout.stride))
        tensor.set_data_type(_dtype(layout.dtype))


def lse_layout(spec: AttentionSpec) -> TensorSpec:
    """Layout of the log-sum-exp, always packed: cuDNN before 9.26 ignores other strides."""
    shape = (*spec.output.shape[:3], 1)
    return TensorSpec(shape, contiguous_stride(shape), "float32")


def _dtype(name: str) -> Any:
    types = runtime.library().data_type
    return {
        "float16": types.HALF,
        "bfloat16": types.BFLOAT16,
        "float32": types.FLOAT,
        "int32": types.INT32,
        "int64": types.INT64,
    }[name]
