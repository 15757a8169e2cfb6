"""What the commands share: options that say what a call is, and how a command ends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from cudnn_mha import devices
from cudnn_mha.checks import MAX_ELEMENTS
from cudnn_mha.terms import ALIGNMENTS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_Command = TypeVar("_Command", bound=Callable[..., None])

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MASK_DTYPES = {"bool": "bool", **DTYPES}
GPUS = click.Choice(devices.profile_names(), case_sensitive=False)


def shape_of(text: str) -> tuple[int, ...]:
    """The numbers of ``4,32,4096,128``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is no list of whole numbers such as 4,32,4096,128")
    shape = tuple(map(int, parts))
    if math.prod(shape) > MAX_ELEMENTS:
        raise click.BadParameter(f"{text!r} has more elements than any GPU's memory")
    return shape


def bhsd(text: str) -> tuple[int, ...]:
    """The shape of query, key or value."""
    shape = shape_of(text)
    if len(shape) not in (3, 4):
        raise click.BadParameter(f"{text!r} must have 4 numbers B,H,S,D or 3 H,S,D")
    return shape


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Arguments that mean nothing, and environment variables, become usage errors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error


def exit_with(*, failed: bool) -> NoReturn:
    click.get_current_context().exit(1 if failed else 0)


def one_of(
    names: Iterable[str], default: str, option: str, text: str
) -> Callable[[_Command], _Command]:
    choice = click.Choice(list(names))
    return click.option(option, type=choice, default=default, show_default=True, help=text)


as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output and nothing else."
)


def window_of(text: str) -> tuple[int, int]:
    """The bounds of ``1023,0``."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [part.removeprefix("-") for part in parts]
    if len(parts) != 2 or not all(n.isascii() and n.isdecimal() for n in numbers):
        raise click.BadParameter(f"{text!r} is no window such as 1023,0 or -1,128")
    left, right = map(int, parts)
    return left, right


def call_options(
    vector: Callable[[str], Any], shape: Callable[[str], Any], *, required: bool
) -> Callable[[_Command], _Command]:
    """The options that say what a call is; ``vector`` and ``shape`` read its shapes."""
    options = (
        click.option(
            "--q",
            "query",
            type=vector,
            required=required,
            metavar="B,HQ,SQ,D",
            help="Shape of query.",
        ),
        click.option(
            "--kv",
            "key",
            type=vector,
            metavar="B,HKV,SKV,D",
            help="Shape of key and value. Default: that of query.",
        ),
        click.option(
            "--v", "value", type=vector, metavar="B,HV,SKV,DV", help="Shape of value, if another."
        ),
        one_of(DTYPES, "bf16", "--dtype", "Of query, key and value."),
        click.option("--causal", is_flag=True, help="Query i sees key j where j <= i."),
        click.option(
            "--backward", is_flag=True, help="Gradients of query, key and value are wanted too."
        ),
        click.option(
            "--mask",
            type=shape,
            metavar="B,HQ,SQ,SKV",
            help="Shape of attn_mask; each number may be 1.",
        ),
        one_of(
            MASK_DTYPES,
            "bool",
            "--mask-dtype",
            "Of attn_mask: bool (true = attend), or added to the scores.",
        ),
        click.option(
            "--dropout",
            type=float,
            default=0.0,
            metavar="P",
            help="Probability, 0 to 1, that an attention weight is dropped.",
        ),
        click.option(
            "--scale",
            type=float,
            metavar="S",
            help="Factor on the scores. Default: 1/sqrt(D).",
        ),
        click.option(
            "--gqa/--no-gqa",
            default=None,
            help="Groups of query heads share key and value heads. Default: where the numbers "
            "differ.",
        ),
        click.option("--lse", is_flag=True, help="The log-sum-exp of each row is wanted too."),
        click.option(
            "--deterministic", is_flag=True, help="Gradients must be bit-equal on every run."
        ),
        click.option(
            "--lengths",
            is_flag=True,
            help="The sequences of a batch have lengths of their own, on both sides.",
        ),
        one_of(
            ALIGNMENTS,
            "top_left",
            "--alignment",
            "Where the diagonal of --causal, --window and --alibi starts or ends.",
        ),
        click.option(
            "--window",
            type=window_of,
            metavar="LEFT,RIGHT",
            help="Keys that are visible before and after the diagonal; -1 for no bound.",
        ),
        click.option("--softcap", type=float, metavar="C", help="Scores s become C * tanh(s / C)."),
        click.option("--alibi", is_flag=True, help="ALiBi with the slopes of its paper."),
        click.option("--slopes", is_flag=True, help="ALiBi with slopes of one's own."),
        click.option(
            "--sinks", is_flag=True, help="Each head has a logit without a key, as in gpt-oss."
        ),
        one_of(
            ("bhsd", "bshd"),
            "bhsd",
            "--layout",
            "Order in memory of query, key and value; shapes are always given as B,H,S,D.",
        ),
    )

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


workspace_limit_option = click.option(
    "--workspace-limit",
    metavar="BYTES",
    help="Most scratch memory on the GPU: bytes, or a number with a unit such as 64MiB.",
)


def require_no_mask(mask: object, causal: bool) -> None:
    if mask is not None and causal:
        raise click.UsageError(
            "--mask and --causal exclude each other; put the causal part into the mask"
        )


def lengths_before_heads(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without data, of that shape and with its dimensions in that order in memory."""
    import torch

    *batch, heads, length, dim = shape
    tensor = torch.empty(*batch, length, heads, dim, dtype=dtype, device="meta")
    return tensor.transpose(-3, -2)
