"""The support matrix: which attention calls cuDNN serves, and why not the others.

cuDNN itself is the authority; asking it costs a graph. The static rules here answer at once and
in plain words, and they hold what cuDNN does not know: the inputs for which a kernel is known to
be wrong although cuDNN accepts them. A call that passes the rules is put to cuDNN, and its
refusal is one more `Reason`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from cudnn_mha.devices import Device
from cudnn_mha.expressions import reads
from cudnn_mha.spec import ITEM_SIZE, AttentionSpec

MAX_GRID = 65535
"""Most blocks in the y and z dimension of a CUDA grid; batch and heads are launched there."""

MAX_INDEX = 2**31
"""Elements that a 32-bit signed index reaches."""

MAX_ELEMENTS = 2**48
"""More elements of one tensor than any GPU's memory holds."""

ALIGNMENT = 16
"""Bytes that base pointers and row strides must be a multiple of."""

HALF_DTYPES = ("float16", "bfloat16")
BIAS_DTYPES = ("float16", "bfloat16", "float32")


class Kind(str, Enum):
    """What a reason says about a call."""

    UNSUPPORTED = "unsupported"  # cuDNN refuses it, or has it but this package does not use it
    WRONG = "wrong"  # cuDNN accepts it and computes something else, or fails when it runs
    POLICY = "policy"  # a setting keeps cuDNN out
    UNAVAILABLE = "unavailable"  # cuDNN or a resource is missing now


@dataclass(frozen=True)
class Reason:
    """One reason why cuDNN does not serve a call.

    Attributes:
        rule: short stable name, such as ``head_dim``.
        message: what it was, what is allowed, and what to do.
        kind: what the reason says about the call.
    """

    rule: str
    message: str
    kind: Kind = Kind.UNSUPPORTED

    def __str__(self) -> str:
        return f"{self.message} [{self.rule}]"


@dataclass(frozen=True)
class Hazard:
    """A family of inputs that a cuDNN kernel gets wrong, and what this package does instead.

    Attributes:
        name: short stable name.
        condition: the family, in words.
        remedy: what is done.
        cost: what the remedy costs, as measured, or "none".
        source: where the fault was seen.
        applies: the condition, for a remedy that changes the graph.
        remedied: the spec with the remedy in it.
    """

    name: str
    condition: str
    remedy: str
    cost: str
    source: str
    applies: Callable[[AttentionSpec, Device], bool] | None = None
    remedied: Callable[[AttentionSpec], AttentionSpec] | None = None


_H200 = "measured on an H200, cuDNN 9.19.0"

HAZARDS = (
    Hazard(
        name="backward_tail",
        condition="backward on sm_90, Sq or Skv no multiple of 128",
        remedy="a padding mask that states the full lengths",
        cost="0.5 to 3 % of the backward's device time",
        source=(
            f"{_H200}: NaN gradients for Sq = 1 and for Skv % 128 == 64 once a row's log-sum-exp "
            "is below about -88; pytorch/pytorch#196678, NVIDIA/cudnn-frontend#1072"
        ),
        applies=lambda spec, device: (
            spec.backward
            and device.sm == 90
            and (spec.seq_q % 128 != 0 or spec.seq_kv % 128 != 0)
            and not (spec.padding or spec.lengths or spec.modified)
        ),
        remedied=lambda spec: dataclasses.replace(spec, padding=True),
    ),
    Hazard(
        name="past_the_keys",
        condition="Sq > Skv with a left bound or the bottom right diagonal",
        remedy="a padding mask that states the full lengths",
        cost="an unknown amount: there is no plan without it",
        source="cuDNN 9.24 refuses such a graph that is told no lengths",
        applies=lambda spec, device: (
            spec.seq_q > spec.seq_kv
            and (spec.bottom_right or spec.left is not None)
            and not (spec.padding or spec.lengths or spec.modified)
        ),
        remedied=lambda spec: dataclasses.replace(spec, padding=True),
    ),
    Hazard(
        name="misaligned",
        condition=f"a base pointer or a row stride that is no multiple of {ALIGNMENT} bytes",
        remedy="the tensor is copied",
        cost="one copy of that tensor",
        source="NVIDIA/cudnn-frontend#1571 (wrong output on sm_90, a fault elsewhere); for the "
        f"bias {_H200}: a sticky misaligned-address fault at 2 bytes",
    ),
    Hazard(
        name="bias_broadcast",
        condition="a bias whose Sq or Skv extent is 1",
        remedy="Sq is broadcast by stride 0, Skv is written out",
        cost="none for Sq; one row per (batch, head, Sq) written for Skv",
        source=f"{_H200}: gradients wrong by 80 % and more with a declared Sq extent of 1, output "
        "wrong by up to 28 % with (B, H, 1, 1)",
    ),
    Hazard(
        name="bias_gradient_broadcast",
        condition="a bias gradient whose Sq or Skv extent is 1",
        remedy="the gradient is computed over (Sq, Skv) and summed by PyTorch",
        cost="one (Sq, Skv) gradient and its sum",
        source=f"{_H200}: memory beyond the gradient is overwritten",
    ),
    Hazard(
        name="low_mask_rows",
        condition="a float mask with a row that has no entry above -1e4 and is not all -inf",
        remedy="the row's largest entry is subtracted, to which softmax is invariant",
        cost="two passes over a float mask",
        source=f"{_H200}: gradients too large by the number of keys for rows of -1e30 (the "
        "log-sum-exp rounds), zeros for rows of the dtype's lowest number (it overflows in base 2)",
    ),
    Hazard(
        name="scale_not_positive",
        condition="a scale of 0 or below",
        remedy="the query is multiplied by the scale's sign and the scale made positive",
        cost="one pass over the query",
        source=f"{_H200}: NaN, since the row's maximum is taken before the scale",
    ),
    Hazard(
        name="empty_row_backward",
        condition="backward of a mask, which may have rows that attend to nothing",
        remedy="the backward is given a log-sum-exp of +inf for such rows, so all weights are 0",
        cost="one pass over the log-sum-exp, (B, Hq, Sq) float32",
        source=f"{_H200}: NaN gradients for Sq = 1 and Skv % 128 == 64, garbage for Skv = 1",
    ),
    Hazard(
        name="padding_read",
        condition="padded sequences whose padding holds NaN or infinity",
        remedy="the tensors are described as ragged, which reads no padding; where that is not "
        "known to help, copies with zeros there are read",
        cost="3 to 20 % of the device time, measured by shape; three copies elsewhere",
        source=f"{_H200}: NaN throughout the output and gradients of such sequences, since weights "
        "of 0 are multiplied with it",
    ),
    Hazard(
        name="skipped_sequences",
        condition="sequences without queries or without keys, and what lies behind a sequence",
        remedy="output and gradients are made zero beforehand",
        cost="one write of each, about 5 % of the device time",
        source=f"{_H200}: ragged graphs leave such rows as they were",
    ),
    Hazard(
        name="ragged_single_query",
        condition="ragged tensors with at most one query for each sequence",
        remedy="the graph is made for more queries, where log-sum-exp or gradients are wanted",
        cost="not measured",
        source=f"{_H200}: log-sum-exp off by 2.4 and gradients by 70 % with grouped heads; "
        "NVIDIA/cudnn-frontend#1083",
    ),
    Hazard(
        name="bounded_workspace",
        condition="a ragged backward with a bound on all tokens (of a packed batch that fills less "
        "than half of a padded one), query not packed densely",
        remedy="the query is copied",
        cost="one copy of the query",
        source=f"{_H200}: the query's gradient is wrong by 100 %",
    ),
    Hazard(
        name="score_operations",
        condition="soft cap, score_mod or ALiBi by operations of our own on the scores, with masks",
        remedy="always two masks, and no index below 0; beside lengths the call is refused",
        cost="none",
        source=f"{_H200}: one mask alone does not compile; with a negative index all keys are "
        "hidden; of an operand with one entry for each sequence kernels read the wrong one, and "
        "with a third mask they read memory that is not theirs",
    ),
    Hazard(
        name="beyond_the_scores",
        condition="a score_mod, Sq or Skv no multiple of 128",
        remedy="indices are kept within the scores, and backward graphs give no weight to the rest "
        "and take scores for -1e9 at least",
        cost="an operation for each index, and up to nine more in the backward; not measured",
        source=f"{_H200}: NaN gradients wherever the derivative reads the score, which is -inf "
        "there: what kernels compute beyond is multiplied by weights of 0",
    ),
    Hazard(
        name="index_of_one_query",
        condition="operations of our own on the scores that read a key's index, with one query",
        remedy="the call is refused",
        cost="PyTorch computes it",
        source=f"{_H200}: output wrong by 60 to 90 % for 300 keys, with a score_mod that reads the "
        "index and with a band beside any; right for 256",
    ),
    Hazard(
        name="second_hand_scores",
        condition="an operation of our own on two values, the second of them the scores themselves",
        remedy="it is given the scores times 1",
        cost="one multiplication; not measured",
        source="measured on an H200, cuDNN 9.28.1: the forward reads memory that is not its own "
        "for score * score and tanh(score) * score, not for score * sigmoid(score); not 9.19.0",
    ),
    Hazard(
        name="other_kernels_of_one_query",
        condition="ALiBi or dropout beside lengths, one query",
        remedy="the tensors are described as ragged, as for more queries",
        cost="not measured",
        source="measured on an H200, cuDNN 9.19.0 and 9.28.1: with ALiBi NaN where padding holds "
        "it and for sequences without keys, which the kernels of other such calls get right; "
        "dropout has the same kernels in 9.24",
    ),
    Hazard(
        name="launch_grid",
        condition=f"B or Hq above {MAX_GRID}",
        remedy="the call is split over batch or heads",
        cost="one launch per part and a concatenation",
        source=f"{_H200}: the launch fails; pytorch/pytorch#180718",
    ),
    Hazard(
        name="index_overflow",
        condition="backward with a tensor that spans 2^31 elements or more",
        remedy="the call is split over batch or heads",
        cost="one launch per part and a concatenation",
        source=f"{_H200}: dQ wrong by 17 %, dK by 11 % in the last batch of (530, 64, 512, 128)",
    ),
)


def remedied(spec: AttentionSpec, device: Device) -> AttentionSpec:
    """``spec`` with every graph-level remedy of `HAZARDS` that it needs."""
    for hazard in HAZARDS:
        if hazard.applies and hazard.remedied and hazard.applies(spec, device):
            spec = hazard.remedied(spec)
    return spec


def check(spec: AttentionSpec, device: Device, version: int) -> tuple[Reason, ...]:
    """Every static reason why cuDNN ``version`` on ``device`` does not serve ``spec``."""
    return tuple(reason for rule in _RULES for reason in rule(spec, device, version))


def not_half(dtype: str) -> Reason:
    """The reason for a call of another dtype than cuDNN attention computes in."""
    return Reason(
        "dtype",
        f"query, key and value must be float16 or bfloat16, got {dtype}; cast them or use "
        "torch.autocast",
    )


def _capability(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    if device.sm < 80:
        yield Reason(
            "capability",
            f"{device.name} has compute capability {device.sm / 10:.1f}; cuDNN attention needs "
            "8.0 (Ampere) or newer",
        )


def _dtypes(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    found = {name: getattr(spec, name).dtype for name in ("query", "key", "value")}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
        yield Reason(
            "dtype",
            f"query, key and value must all be float16 or all bfloat16, got {listed}; cast them "
            "or use torch.autocast",
        )
    elif spec.query.dtype not in HALF_DTYPES:
        yield not_half(spec.query.dtype)
    if spec.bias is not None and spec.bias.dtype not in BIAS_DTYPES:
        yield Reason(
            "bias_dtype", f"a float attn_mask must be one of {BIAS_DTYPES}, got {spec.bias.dtype}"
        )


def _layouts(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    for name, tensor in spec.tensors.items():
        if tensor.stride[-1] != 1 and tensor.shape[-1] > 1:
            yield Reason(
                "last_stride",
                f"{name} must have stride 1 in its last dimension, got strides {tensor.stride}",
            )
        if name in ("bias", "grad_bias", "page_table"):
            continue
        item = ITEM_SIZE.get(tensor.dtype, 2)
        rows = zip(tensor.shape[:-1], tensor.stride[:-1], strict=True)
        if any(stride * item % ALIGNMENT for size, stride in rows if size > 1):
            yield Reason(
                "row_stride",
                f"{name} must have strides that are multiples of {ALIGNMENT} bytes, got "
                f"{tensor.stride} elements of {item} bytes",
                Kind.WRONG,  # older frontends plan it all the same
            )


def _sizes(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    if 0 in (*spec.query.shape, *spec.key.shape, *spec.value.shape):
        # cuDNN plans for Skv = 0 and divides by zero while it plans for Sq = 0.
        message = "a dimension is 0; there is nothing for cuDNN to compute"
        yield Reason("empty", message, Kind.WRONG)
        return
    for name, heads in (("key", spec.heads_k), ("value", spec.heads_v)):
        if spec.heads_q % heads:
            yield Reason(
                "heads",
                f"the heads of {name} must divide those of query, got {heads} and {spec.heads_q}",
            )
    for name, size in (("batch", spec.batch), ("query heads", spec.heads_q)):
        if size > MAX_GRID:
            yield Reason(
                "launch_grid",
                f"{name} must be at most {MAX_GRID}, got {size}; split the call",
                Kind.WRONG,
            )
    sizes = {"the length of query": spec.seq_q, "the length of key and value": spec.seq_kv}
    sizes |= {"the head dimension of query and key": spec.dim_qk}
    sizes |= {"the head dimension of value": spec.dim_v}
    for name, size in sizes.items():
        if size >= MAX_INDEX:
            yield Reason("size", f"{name} must be below 2^31, got {size}; make it smaller")
    if spec.backward:
        if spec.seq_q == spec.seq_kv == 1:
            yield Reason("single_token", "the backward needs Sq > 1 or Skv > 1, got Sq = Skv = 1")
        for name, tensor in spec.tensors.items():
            if name not in ("bias", "grad_bias") and tensor.extent >= MAX_INDEX:
                yield Reason(
                    "index_overflow",
                    f"{name} must span less than 2^31 elements in the backward, got "
                    f"{tensor.extent}; split the call over the batch",
                    Kind.WRONG,
                )


def _head_dims(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    dims = (spec.dim_qk, spec.dim_v)
    text = f"got Dqk = {dims[0]}, Dv = {dims[1]}"
    if any(d % 8 for d in dims):
        yield Reason("head_dim", f"head dimensions must be multiples of 8, {text}")
    if not spec.backward:
        return
    limit = 256 if device.sm == 90 else 128
    if max(dims) <= limit:
        return
    allowed = f"head dimensions up to {limit}"
    if device.sm // 10 == 10:
        if dims == (192, 128) or (dims == (256, 256) and version >= 92300):
            return
        allowed += ", (192, 128)" + (" and (256, 256)" if version >= 92300 else "")
    yield Reason("head_dim", f"the backward on sm_{device.sm} takes {allowed}, {text}")


def _dropout(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    p = spec.dropout_p
    if not 0 <= p < 1:
        yield Reason("dropout", f"dropout_p must be in [0, 1), got {p}")
    elif p and device.sm != 90 and not (p * 16).is_integer():
        # The rate was measured to be p itself on sm_90 only.
        yield Reason(
            "dropout",
            f"dropout_p must be a multiple of 1/16 on sm_{device.sm}, got {p}: kernels there are "
            "known to round it (pytorch/pytorch#174245)",
            Kind.WRONG,
        )


def _single_key(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    # With cuDNN 9.19, 9.24 and 9.28 alike.
    if spec.backward and spec.bias is not None and spec.seq_kv == 1 and device.sm // 10 in (8, 12):
        yield Reason(
            "single_key",
            f"the backward on sm_{device.sm} takes no attn_mask where Skv = 1; drop the mask",
        )


def _exclusive(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    """What cannot be had together on sm_10x, with cuDNN 9.19, 9.24 and 9.28 alike."""
    if not spec.backward or device.sm // 10 != 10:
        return
    this = f"the backward on sm_{device.sm}"
    dims = (spec.dim_qk, spec.dim_v)
    used = {
        "an attn_mask that requires a gradient": spec.grad_bias is not None,
        "dropout": spec.dropout_p > 0,
        "deterministic gradients": spec.deterministic,
    }
    names = [name for name, is_used in used.items() if is_used]
    for pair in itertools.combinations(names, 2):
        yield Reason("exclusive", f"{this} takes only one of {' and '.join(pair)}")
    if spec.grad_bias is not None and max(dims) > 128:
        yield Reason(
            "exclusive",
            f"{this} takes an attn_mask that requires a gradient with head dimensions up to 128 "
            f"only, got Dqk = {dims[0]}, Dv = {dims[1]}",
        )
    if spec.dropout_p > 0 and dims == (256, 256):  # the kernel for these is deterministic
        yield Reason("exclusive", f"{this} takes no dropout with head dimensions (256, 256)")


def _sinks(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    if spec.sinks and not spec.backward and spec.seq_q == 1:
        yield Reason(
            "sinks_single_query",
            "sinks are not served for one query where a gradient is wanted: kernels for one query "
            "know no sinks, and what applies them afterwards has no gradient; call it under "
            "torch.no_grad(), or make it two queries",
        )


def _score_operations(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    counting = {
        "a score_mod that reads kv_index": reads(spec.score_mod, "kv_index"),
        "a window or causality beside a soft cap, a score_mod or ALiBi": spec.banded,
        "ALiBi of given slopes, or of no causal call": spec.slopes,
    }
    for what, counts in counting.items():
        if counts and spec.modified and spec.seq_q == 1:
            message = f"{what} is not served for one query: kernels for that count keys wrong; "
            message += "leave it out, or make it two queries"
            yield Reason("score_operations", message, Kind.WRONG)
    if not (spec.modified and (spec.lengths or spec.padding)):
        return
    told = "kernels take no lengths there, and read those that are told otherwise wrong"
    for name, used in (("a soft cap", spec.softcap), ("a score_mod", spec.score_mod)):
        if used:
            message = f"{name} is not served beside lengths: {told}; drop the one or the other"
            yield Reason("score_operations", message, Kind.WRONG)
    if spec.slopes:
        message = "ALiBi is served beside lengths only causal from the top left corner with the "
        message += f"paper's slopes: {told}; make it so, or drop the lengths"
        yield Reason("score_operations", message, Kind.WRONG)


def _pages(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    if spec.page_table is not None and spec.key.shape[2] & (spec.key.shape[2] - 1):
        yield Reason("page_size", f"page sizes must be powers of two, got {spec.key.shape[2]}")


def _known_wrong(spec: AttentionSpec, device: Device, version: int) -> Iterator[Reason]:
    bad_decode = 91900 <= version <= 92500 and version != 92401
    if spec.seq_q == 1 and device.sm // 10 in (10, 11) and bad_decode:
        yield Reason(
            "decode",
            "a query of length 1 gives wrong values on sm_10x and sm_11x with cuDNN 9.19 to "
            "9.25.0 except 9.24.1 (pytorch/pytorch#193893); install another cuDNN",
            Kind.WRONG,
        )


_RULES = (
    _capability,
    _dtypes,
    _layouts,
    _sizes,
    _head_dims,
    _dropout,
    _single_key,
    _exclusive,
    _sinks,
    _score_operations,
    _pages,
    _known_wrong,
)
