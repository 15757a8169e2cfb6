"""From an `AttentionSpec` to a cuDNN operation graph.

The builder sees the spec and the device and nothing else, so whatever it puts into a graph is in
the plan cache's key. Tensors carry fixed ids (`Uid`), by which a plan finds its operands.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, NamedTuple

from cudnn_mha import runtime
from cudnn_mha.devices import Device
from cudnn_mha.expressions import (
    Expression,
    bounded,
    capped,
    derivative,
    far_below,
    first_hand,
    numbers,
    within,
)
from cudnn_mha.spec import AttentionSpec, TensorSpec, dense_stride


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
    OFFSET_QUERY = 11
    OFFSET_KEY = 12
    OFFSET_VALUE = 13
    OFFSET_OUTPUT = 14
    OFFSET_LSE = 15
    SINKS = 16
    SLOPES = 17
    PAGE_TABLE_KEY = 19
    PAGE_TABLE_VALUE = 20
    FIRST = 21
    LAST = 22
    MINUS_INFINITY_FIRST = 23
    MINUS_INFINITY_LAST = 24
    SHIFT = 25
    GRAD_OUTPUT = 31
    GRAD_QUERY = 32
    GRAD_KEY = 33
    GRAD_VALUE = 34
    GRAD_BIAS = 35
    OFFSET_GRAD_OUTPUT = 36
    OFFSET_GRAD_QUERY = 37
    OFFSET_GRAD_KEY = 38
    OFFSET_GRAD_VALUE = 39
    GRAD_SINKS = 40


FIRST_NUMBER = 100
"""The id of the first number in the operations on the scores; further ones have those above."""


def operands(spec: AttentionSpec) -> tuple[int, ...]:
    """The ids that a graph of ``spec`` takes, in ascending order."""
    backward, lse = spec.backward, spec.lse or spec.backward
    present = {
        Uid.QUERY: True,
        Uid.KEY: True,
        Uid.VALUE: True,
        Uid.OUTPUT: True,
        Uid.LSE: lse,
        Uid.BIAS: spec.bias is not None,
        Uid.DROPOUT_SEED: spec.dropout_p > 0,
        Uid.DROPOUT_OFFSET: spec.dropout_p > 0,
        Uid.SEQ_LEN_Q: _told_lengths(spec),
        Uid.SEQ_LEN_KV: _told_lengths(spec),
        Uid.OFFSET_QUERY: spec.ragged,
        Uid.OFFSET_KEY: spec.ragged and spec.page_table is None,
        Uid.OFFSET_VALUE: spec.ragged and spec.page_table is None,
        Uid.OFFSET_OUTPUT: spec.ragged,
        Uid.OFFSET_LSE: spec.ragged and lse,
        Uid.SINKS: _takes_sinks(spec),
        Uid.SLOPES: spec.slopes,
        Uid.PAGE_TABLE_KEY: spec.page_table is not None,
        Uid.PAGE_TABLE_VALUE: spec.page_table is not None,
        Uid.FIRST: _masked(spec) and _bounds(spec)[0] != 0,
        Uid.LAST: _masked(spec) and _bounds(spec)[1] != 0,
        Uid.MINUS_INFINITY_FIRST: _masked(spec),
        Uid.MINUS_INFINITY_LAST: _masked(spec),
        Uid.SHIFT: spec.slopes and _shift(spec) != 0,
        Uid.GRAD_OUTPUT: backward,
        Uid.GRAD_QUERY: backward,
        Uid.GRAD_KEY: backward,
        Uid.GRAD_VALUE: backward,
        Uid.GRAD_BIAS: spec.grad_bias is not None,
        Uid.OFFSET_GRAD_OUTPUT: backward and spec.ragged,
        Uid.OFFSET_GRAD_QUERY: backward and spec.ragged,
        Uid.OFFSET_GRAD_KEY: backward and spec.ragged,
        Uid.OFFSET_GRAD_VALUE: backward and spec.ragged,
        Uid.GRAD_SINKS: spec.grad_sinks,
    }
    return (*(uid for uid, used in present.items() if used), *_numbers(spec).values())


def operand_layouts(spec: AttentionSpec) -> dict[Uid, TensorSpec]:
    """Layouts of the operands of a graph without lengths, but for its `constants`."""
    one, by_head = _one_each(1, "int64"), _by_head(spec)
    layouts = {
        Uid.QUERY: spec.query,
        Uid.KEY: spec.key,
        Uid.VALUE: spec.value,
        Uid.OUTPUT: spec.output,
        Uid.LSE: lse_layout(spec),
        Uid.BIAS: spec.bias,
        Uid.DROPOUT_SEED: one,
        Uid.DROPOUT_OFFSET: one,
        Uid.SINKS: by_head,
        Uid.SLOPES: by_head,
        Uid.GRAD_OUTPUT: spec.grad_output,
        Uid.GRAD_QUERY: spec.grad_query,
        Uid.GRAD_KEY: spec.grad_key,
        Uid.GRAD_VALUE: spec.grad_value,
        Uid.GRAD_BIAS: spec.grad_bias,
        Uid.GRAD_SINKS: by_head,
    }
    given = [Uid(uid) for uid in operands(spec) if uid not in constants(spec)]
    found = {uid: layouts[uid] for uid in given}
    return {uid: layout for uid, layout in found.items() if layout is not None}


TILE = 128
"""Queries and keys that kernels compute at once, or a multiple of that."""

FAR = 2**29
"""A distance from the diagonal that no key has."""


class Constant(NamedTuple):
    """An operand whose value is the spec's."""

    layout: TensorSpec
    value: float


def constants(spec: AttentionSpec) -> dict[int, Constant]:
    """The operands that a plan provides itself, in ascending order of their ids."""
    found: dict[int, Constant] = {}
    uid: int
    if spec.padding and not spec.modified:
        layout = _one_each(spec.batch, "int32")
        found[Uid.SEQ_LEN_Q] = Constant(layout, spec.seq_q)
        found[Uid.SEQ_LEN_KV] = Constant(layout, spec.seq_kv)
    if _masked(spec):
        for uid, bound in zip((Uid.FIRST, Uid.LAST), _bounds(spec), strict=True):
            if bound:
                found[uid] = Constant(_one_each(1, "int32"), abs(bound))
        for uid in (Uid.MINUS_INFINITY_FIRST, Uid.MINUS_INFINITY_LAST):
            found[uid] = Constant(_one_each(1, "float32"), -math.inf)
    if spec.slopes and _shift(spec):
        found[Uid.SHIFT] = Constant(_one_each(1, "int32"), abs(_shift(spec)))
    for value, uid in _numbers(spec).items():
        found[uid] = Constant(_one_each(1, "float32"), value)
    return found


def _expression(spec: AttentionSpec) -> Expression:
    """What becomes of the scores, but for biases and masks.

    Kernels compute tiles of queries and keys, so indices beyond the last ones are kept off.
    """
    expression = "score" if spec.score_mod is None else within(spec.score_mod, _torn(spec))
    return capped(expression, spec.softcap) if spec.softcap else expression


def _torn(spec: AttentionSpec) -> dict[str, int]:
    """The lengths, by the names of their indices, of which the last tile holds more."""
    lengths = {"q_index": spec.seq_q, "kv_index": spec.seq_kv}
    return {index: length for index, length in lengths.items() if length % TILE}


def _recomputed(spec: AttentionSpec) -> Expression:
    """The expression as a graph of this direction has it.

    Backward kernels multiply weights that lie beyond the last query and key by 0: they must be
    finite, which a score of 0 among very low ones is not.
    """
    expression = _expression(spec)
    if spec.backward and spec.score_mod is not None:
        expression = far_below(bounded(expression), _torn(spec))
    return first_hand(expression)


def _derivative(spec: AttentionSpec) -> Expression:
    """The derivative of the expression by the score, as a backward graph has it."""
    found = derivative(_expression(spec))
    return first_hand(found if spec.score_mod is None else bounded(found))


def _numbers(spec: AttentionSpec) -> dict[float, int]:
    """The ids of the numbers in the operations on the scores."""
    if not spec.modified:
        return {}
    found = list(numbers(_recomputed(spec)))
    if spec.backward:
        found += numbers(_derivative(spec))
    return {value: FIRST_NUMBER + n for n, value in enumerate(dict.fromkeys(found))}


def _told_lengths(spec: AttentionSpec) -> bool:
    """Whether lengths are operands; graphs with operations of our own heed none."""
    return (spec.padding or spec.lengths) and not spec.modified


def _takes_sinks(spec: AttentionSpec) -> bool:
    """Whether sinks are an operand: gradients find them in the log-sum-exp, but for their own."""
    return spec.sinks and (spec.grad_sinks or not spec.backward)


def _masked(spec: AttentionSpec) -> bool:
    """Whether our own operations hide keys."""
    return spec.modified and spec.banded


def _shift(spec: AttentionSpec) -> int:
    """By how much the diagonal lies to the right of that of the top left corner."""
    return spec.seq_kv - spec.seq_q if spec.bottom_right else 0


def _bounds(spec: AttentionSpec) -> tuple[int, int]:
    """``(first, last)``: row i sees columns j where ``i <= j + first`` and ``j <= i + last``."""
    left = FAR if spec.left is None else spec.left
    right = 0 if spec.causal else FAR if spec.right is None else spec.right
    return left - _shift(spec), right + _shift(spec)


def _by_head(spec: AttentionSpec) -> TensorSpec:
    return TensorSpec((1, spec.heads_q, 1, 1), (spec.heads_q, 1, 1, 1), "float32")


def _one_each(count: int, dtype: str) -> TensorSpec:
    return TensorSpec((count, 1, 1, 1), (1, 1, 1, 1), dtype)


def build_graph(spec: AttentionSpec, device: Device) -> Any:
    """The validated operation graph of ``spec`` for ``device``, no plan proposed yet.

    Raises:
        cudnn.cudnnGraphNotSupportedError: cuDNN has no such graph.
    """
    return _Nodes(spec, device).build()


def propose_plans(spec: AttentionSpec, device: Device) -> Any:
    """The graph of ``spec`` with cuDNN's plans for it in heuristic order, none of them compiled.

    Raises:
        cudnn.cudnnGraphNotSupportedError: cuDNN has no such graph, or no plan.
    """
    heuristics = runtime.library().heur_mode
    nodes = _Nodes(spec, device)
    try:
        graph = nodes.build()
        graph.create_execution_plans([heuristics.A, heuristics.FALLBACK])
        graph.check_support()
    finally:
        nodes.let_go()
    return graph


class _Nodes:
    """The tensors and the one attention node of a graph."""

    def __init__(self, spec: AttentionSpec, device: Device) -> None:
        self.spec = spec
        self.graph: Any = runtime.library().pygraph(
            name=f"sdpa_{spec.direction.value}",
            io_data_type=_dtype(spec.query.dtype),
            intermediate_data_type=_dtype("float32"),
            compute_data_type=_dtype("float32"),
            **_where(device),
        )
        self._made: dict[Expression, Any] = {}
        self._inner: Any = None

    def build(self) -> Any:
        if self.spec.backward:
            self._add_backward()
        else:
            self._add_forward()
        self.graph.validate()
        self.graph.build_operation_graph()
        return self.graph

    def let_go(self) -> None:
        """Undoes that the graph and the functions that modify its scores hold each other.

        Neither Python nor the frontend's bindings find such a circle, which leads through C++.
        """
        self.graph = None
        self._made.clear()
        for cell in getattr(getattr(self._inner, "_lower", None), "__closure__", None) or ():
            cell.cell_contents = None

    def _add_forward(self) -> None:
        spec = self.spec
        output, lse = self.graph.sdpa(
            **self._common(),
            generate_stats=spec.lse,
        )
        self._output(output, Uid.OUTPUT, spec.output, Uid.OFFSET_OUTPUT)
        if spec.lse:
            self._output(lse, Uid.LSE, lse_layout(spec), Uid.OFFSET_LSE)

    def _add_backward(self) -> None:
        spec = self.spec
        assert spec.grad_output and spec.grad_query and spec.grad_key and spec.grad_value
        options: dict[str, Any] = {}
        if spec.deterministic:
            options["use_deterministic_algorithm"] = True
        if spec.grad_bias is not None:
            options["dBias"] = self._tensor(Uid.GRAD_BIAS, spec.grad_bias)
        if spec.grad_sinks:
            options["dSink_token"] = self._tensor(Uid.GRAD_SINKS, _by_head(self.spec))
        if spec.tokens_q is not None:
            options["max_total_seq_len_q"] = spec.tokens_q
            options["max_total_seq_len_kv"] = spec.tokens_kv
        if spec.modified:
            options["score_mod_bprop"] = self._modified_backward
        gradients = self.graph.sdpa_backward(
            **self._common(),
            o=self._tensor(Uid.OUTPUT, spec.output, Uid.OFFSET_OUTPUT),
            dO=self._tensor(Uid.GRAD_OUTPUT, spec.grad_output, Uid.OFFSET_GRAD_OUTPUT),
            stats=self._tensor(Uid.LSE, lse_layout(spec), Uid.OFFSET_LSE),
            **options,
        )
        layouts = (spec.grad_query, spec.grad_key, spec.grad_value)
        uids = (Uid.GRAD_QUERY, Uid.GRAD_KEY, Uid.GRAD_VALUE)
        offsets = (Uid.OFFSET_GRAD_QUERY, Uid.OFFSET_GRAD_KEY, Uid.OFFSET_GRAD_VALUE)
        for gradient, uid, layout, offset in zip(gradients, uids, layouts, offsets, strict=True):
            self._output(gradient, uid, layout, offset)

    def _common(self) -> dict[str, Any]:
        """What the forward and the backward node share."""
        spec = self.spec
        paged = spec.page_table is not None
        offsets = (None, None) if paged else (Uid.OFFSET_KEY, Uid.OFFSET_VALUE)
        options: dict[str, Any] = {
            "name": "sdpa",
            "q": self._tensor(Uid.QUERY, spec.query, Uid.OFFSET_QUERY),
            "k": self._tensor(Uid.KEY, spec.key, offsets[0]),
            "v": self._tensor(Uid.VALUE, spec.value, offsets[1]),
            "attn_scale": spec.scale,
        }
        if spec.bias is not None:
            options["bias"] = self._tensor(Uid.BIAS, spec.bias)
        if spec.modified:
            options["score_mod"] = self._modified
        elif spec.banded:
            options |= self._band()
        if spec.alibi:
            options["use_alibi_mask"] = True
        if _takes_sinks(spec):
            options["sink_token"] = self._tensor(Uid.SINKS, _by_head(self.spec))
        if _told_lengths(spec):
            lengths = _one_each(spec.batch, "int32")
            options["use_padding_mask"] = True
            options["seq_len_q"] = self._tensor(Uid.SEQ_LEN_Q, lengths)
            options["seq_len_kv"] = self._tensor(Uid.SEQ_LEN_KV, lengths)
        if spec.page_table is not None:
            table = spec.page_table
            options["paged_attention_k_table"] = self._tensor(Uid.PAGE_TABLE_KEY, table)
            options["paged_attention_v_table"] = self._tensor(Uid.PAGE_TABLE_VALUE, table)
            options["paged_attention_max_seq_len_kv"] = spec.seq_kv
        if spec.dropout_p > 0:
            scalar = _one_each(1, "int64")
            options["dropout"] = (
                spec.dropout_p,
                self._tensor(Uid.DROPOUT_SEED, scalar),
                self._tensor(Uid.DROPOUT_OFFSET, scalar),
            )
        return options

    def _band(self) -> dict[str, Any]:
        """cuDNN's band around the diagonal, whose left bound counts the diagonal itself."""
        spec = self.spec
        alignments = runtime.library().diagonal_alignment
        options: dict[str, Any] = {
            "diagonal_alignment": alignments.BOTTOM_RIGHT
            if spec.bottom_right
            else alignments.TOP_LEFT
        }
        if spec.left is not None:
            options["diagonal_band_left_bound"] = spec.left + 1
        if spec.causal or spec.right is not None:
            options["diagonal_band_right_bound"] = 0 if spec.causal else spec.right
        return options

    def _modified(self, graph: Any, scores: Any) -> Any:
        """The expression, ALiBi and band on the scores: cuDNN's masks exclude operations of ours.

        The band always has both of its bounds, the missing one out of reach: with one alone
        cuDNN 9.19 and 9.24 generate code that does not compile.
        """
        spec = self.spec
        self._inner = graph
        constant = {uid: self._tensor(uid, layout) for uid, (layout, _) in constants(spec).items()}
        self._made = {"score": scores}
        self._made |= {value: constant[uid] for value, uid in _numbers(spec).items()}
        scores = self._operations(graph, _recomputed(spec))
        if not (spec.slopes or _masked(spec)):
            return scores
        types = runtime.library().data_type

        def typed(tensor: Any, dtype: Any) -> Any:
            tensor.set_data_type(dtype)
            return tensor

        rows, columns = (
            typed(graph.gen_index(input=scores, axis=axis), types.INT32) for axis in (2, 3)
        )

        def moved(tensor: Any, uid: Uid, by: int) -> Any:
            """An index and a number above 0: cuDNN takes indices for unsigned."""
            return typed(graph.add(a=tensor, b=constant[uid]), types.INT32) if by > 0 else tensor

        if spec.slopes:
            shift = _shift(spec)
            above, below = moved(rows, Uid.SHIFT, shift), moved(columns, Uid.SHIFT, -shift)
            distance = typed(graph.sub(a=above, b=below), types.FLOAT)
            if not (spec.causal or spec.right == 0):
                distance = typed(graph.abs(input=distance), types.FLOAT)
            slopes = self._tensor(Uid.SLOPES, _by_head(self.spec))
            scores = graph.sub(a=scores, b=typed(graph.mul(a=distance, b=slopes), types.FLOAT))
        if not _masked(spec):
            return scores
        first, last = _bounds(spec)
        for uid, bound, more, less, hidden in (
            (Uid.LAST, last, rows, columns, Uid.MINUS_INFINITY_LAST),
            (Uid.FIRST, first, columns, rows, Uid.MINUS_INFINITY_FIRST),
        ):
            visible = graph.cmp_ge(
                input=moved(more, uid, bound), comparison=moved(less, uid, -bound)
            )
            scores = graph.binary_select(
                input0=scores, input1=constant[hidden], mask=typed(visible, types.BOOLEAN)
            )
        return scores

    def _modified_backward(self, graph: Any, gradient: Any) -> Any:
        """The gradient of what `_modified` did; where it masked, the weights are 0 already."""
        self._made["gradient"] = gradient
        return self._operations(graph, _derivative(self.spec))

    def _operations(self, graph: Any, expression: Expression) -> Any:
        """The tensor of an expression; what is made already, in the forward too, serves again."""
        if expression not in self._made:
            if isinstance(expression, tuple):
                name, *given = expression
                made = getattr(graph, name)(*(self._operations(graph, each) for each in given))
            else:
                axis = 2 if expression == "q_index" else 3
                types = runtime.library().data_type
                index = graph.gen_index(input=self._made["score"], axis=axis)
                index.set_data_type(types.INT32)
                made = graph.identity(input=index)
                made.set_data_type(types.FLOAT)
            self._made[expression] = made
        return self._made[expression]

    def _tensor(self, uid: int, layout: TensorSpec, offset: Uid | None = None) -> Any:
        tensor = self.graph.tensor(
            name=Uid(uid).name.lower() if uid < FIRST_NUMBER else f"number_{uid - FIRST_NUMBER}",
            uid=int(uid),
            dim=list(layout.shape),
            stride=list(layout.stride),
            data_type=_dtype(layout.dtype),
        )
        self._place(tensor, offset)
        return tensor

    def _output(self, tensor: Any, uid: Uid, layout: TensorSpec, offset: Uid) -> None:
        tensor.set_output(True).set_uid(int(uid)).set_name(uid.name.lower())
        tensor.set_dim(list(layout.shape)).set_stride(list(layout.stride))
        tensor.set_data_type(_dtype(layout.dtype))
        self._place(tensor, offset)

    def _place(self, tensor: Any, offset: Uid | None) -> None:
        """Tells where the sequences of a ragged tensor start."""
        if self.spec.ragged and offset is not None:
            tensor.set_ragged_offset(self._tensor(offset, _one_each(self.spec.batch + 1, "int64")))


def lse_layout(spec: AttentionSpec) -> TensorSpec:
    """Layout of the log-sum-exp, always packed: cuDNN before 9.26 ignores other strides.

    By token where the tensors are ragged, so that it holds no length of any sequence.
    """
    batch, heads, seq, _ = spec.output.shape
    order = (0, 2, 1, 3) if spec.ragged else (0, 1, 2, 3)
    shape = (batch, heads, seq, 1)
    return TensorSpec(shape, dense_stride(shape, order), "float32")


def _where(device: Device) -> dict[str, Any]:
    """For which device the frontend plans."""
    if device.index is None:
        properties = runtime.library().create_device_properties(device.properties)
        return {"device_property": properties, "sm_version": device.sm}
    stream = runtime.current_stream(device.index)
    return {"handle": runtime.lease(device.index, stream).handle}


def _dtype(name: str) -> Any:
    types = runtime.library().data_type
    return {
        "float16": types.HALF,
        "bfloat16": types.BFLOAT16,
        "float32": types.FLOAT,
        "int32": types.INT32,
        "int64": types.INT64,
    }[name]
