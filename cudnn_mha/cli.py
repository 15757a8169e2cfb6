"""The command line: ``cudnn-mha demo``, ``doctor`` and ``check``.

Importing this module loads neither torch nor cuDNN, so that ``--help`` answers at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from rich.console import Console

from cudnn_mha import __version__, config, devices, printing
from cudnn_mha.errors import CudnnUnavailableError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cudnn_mha.doctor import Facts, Finding, Report
    from cudnn_mha.explanation import Explanation

_Command = TypeVar("_Command", bound=Callable[..., None])

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MASK_DTYPES = {"bool": "bool", **DTYPES}
GPUS = click.Choice(devices.profile_names(), case_sensitive=False)
MOST_ELEMENTS = 2**48


class _Commands(click.Group):
    """Gives an installation that does not work a message in place of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CudnnUnavailableError as error:
            raise click.ClickException(str(error)) from error
        except ImportError as error:
            raise click.ClickException(
                f"{error}; `cudnn-mha doctor` shows what is wrong"
            ) from error


def _shape(text: str) -> tuple[int, ...]:
    """The numbers of ``4,32,4096,128``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is no list of whole numbers such as 4,32,4096,128")
    shape = tuple(map(int, parts))
    if math.prod(shape) > MOST_ELEMENTS:
        raise click.BadParameter(f"{text!r} has more elements than any GPU's memory")
    return shape


def _bhsd(text: str) -> tuple[int, ...]:
    """The shape of query, key or value."""
    shape = _shape(text)
    if len(shape) not in (3, 4):
        raise click.BadParameter(f"{text!r} must have 4 numbers B,H,S,D or 3 H,S,D")
    return shape


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """Arguments that mean nothing, and environment variables, become usage errors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error


def _exit(*, failed: bool) -> NoReturn:
    click.get_current_context().exit(1 if failed else 0)


def _one_of(
    names: Iterable[str], default: str, option: str, text: str
) -> Callable[[_Command], _Command]:
    choice = click.Choice(list(names))
    return click.option(option, type=choice, default=default, show_default=True, help=text)


_as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output and nothing else."
)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cudnn-mha", message="%(prog)s %(version)s")
def main() -> None:
    """Attention for PyTorch through cuDNN.

    Every command exits with 0 for yes or done, 1 for no or failed, 2 for a call that makes no
    sense. Environment variables are described in the README and shown by `doctor`.
    """


# ------------------------------------------------------------------------------------------ check


@main.command()
@click.option("--gpu", type=GPUS, help="The GPU to ask for. Default: the one of this machine.")
@click.option(
    "--q", "query", type=_bhsd, required=True, metavar="B,HQ,SQ,D", help="Shape of query."
)
@click.option(
    "--kv",
    "key",
    type=_bhsd,
    metavar="B,HKV,SKV,D",
    help="Shape of key and value. Default: that of query.",
)
@click.option("--v", "value", type=_bhsd, metavar="B,HV,SKV,DV", help="Shape of value, if another.")
@_one_of(DTYPES, "bf16", "--dtype", "Of query, key and value.")
@click.option("--causal", is_flag=True, help="Query i sees key j where j <= i.")
@click.option("--backward", is_flag=True, help="Gradients of query, key and value are wanted too.")
@click.option(
    "--mask", type=_shape, metavar="B,HQ,SQ,SKV", help="Shape of attn_mask; each number may be 1."
)
@_one_of(
    MASK_DTYPES,
    "bool",
    "--mask-dtype",
    "Of attn_mask: bool (true = attend), or added to the scores.",
)
@click.option(
    "--dropout",
    type=float,
    default=0.0,
    metavar="P",
    help="Probability, 0 to 1, that an attention weight is dropped.",
)
@click.option("--scale", type=float, metavar="S", help="Factor on the scores. Default: 1/sqrt(D).")
@click.option(
    "--gqa/--no-gqa",
    default=None,
    help="Groups of query heads share key and value heads. Default: where the numbers differ.",
)
@click.option("--lse", is_flag=True, help="The log-sum-exp of each row is wanted too.")
@click.option("--deterministic", is_flag=True, help="Gradients must be bit-equal on every run.")
@click.option(
    "--workspace-limit",
    metavar="BYTES",
    help="Most scratch memory on the GPU: bytes, or a number with a unit such as 64MiB.",
)
@_one_of(
    ("bhsd", "bshd"),
    "bhsd",
    "--layout",
    "Order in memory of query, key and value; shapes are always given as B,H,S,D.",
)
@_as_json
def check(
    gpu: str | None,
    query: tuple[int, ...],
    key: tuple[int, ...] | None,
    value: tuple[int, ...] | None,
    dtype: str,
    causal: bool,
    backward: bool,
    mask: tuple[int, ...] | None,
    mask_dtype: str,
    dropout: float,
    scale: float | None,
    gqa: bool | None,
    lse: bool,
    deterministic: bool,
    workspace_limit: str | None,
    layout: str,
    as_json: bool,
) -> None:
    """Says whether cuDNN serves a call, and why not.

    Prints every reason, the engines and their workspace, what is done about faults of cuDNN's
    kernels that the call would meet, and who computes the call. The graphs are compiled as the
    call itself would; nothing is computed, and with --gpu no GPU is needed.

    Shapes are numbers of elements: B batch, H heads, S sequence length, D head dimension; B may
    be left out. Exits with 0 if cuDNN serves the call and 1 if not.

    \b
    Examples:
      cudnn-mha check --gpu b200 --q 4,32,4096,128 --kv 4,8,4096,128 --causal --backward
      cudnn-mha check --gpu h200 --q 4,16,777,64 --mask 4,1,1,777 --dtype fp16
      cudnn-mha check --gpu a10 --q 1,8,1,128 --kv 1,8,8192,128 --workspace-limit 64MiB --json
    """
    if mask is not None and causal:
        raise click.UsageError(
            "--mask and --causal exclude each other; put the causal part into the mask"
        )
    key = key or query
    value = value or key
    if gqa is None:
        gqa = not query[-3] == key[-3] == value[-3]

    import torch

    from cudnn_mha.explanation import explain

    if gpu is None and not torch.cuda.is_available():
        raise click.UsageError(
            "there is no CUDA GPU here, so --gpu must name one: "
            + ", ".join(devices.profile_names())
        )
    of_dtype: torch.dtype = getattr(torch, DTYPES[dtype])

    def laid_out(shape: tuple[int, ...]) -> Tensor | tuple[int, ...]:
        return _lengths_before_heads(shape, of_dtype) if layout == "bshd" else shape

    with _usage():
        explanation = explain(
            laid_out(query),
            laid_out(key),
            laid_out(value),
            mask,
            dropout,
            causal,
            scale,
            gqa,
            return_lse=lse,
            deterministic=deterministic or None,
            workspace_limit=workspace_limit,
            dtype=of_dtype,
            mask_dtype=getattr(torch, MASK_DTYPES[mask_dtype]),
            requires_grad=backward,
            gpu=gpu,
        )
    if as_json:
        printing.print_json(explanation.to_dict())
    else:
        _show_explanation(explanation)
    _exit(failed=not explanation.served)


def _lengths_before_heads(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without data, of that shape and with its dimensions in that order in memory."""
    import torch

    *batch, heads, length, dim = shape
    tensor = torch.empty(*batch, length, heads, dim, dtype=dtype, device="meta")
    return tensor.transpose(-3, -2)


def _show_explanation(explanation: Explanation) -> None:
    console = printing.console()
    verdict = ("served by cuDNN", "bold green")
    if not explanation.served:
        verdict = ("not served by cuDNN", "bold red")
    printing.line(console, verdict, f" on {explanation.device}")
    for reason in explanation.reasons:
        printing.line(console, ("  reason: ", "bold"), str(reason))
    for graph in explanation.graphs:
        direction, _, rest = graph.spec.partition(" ")
        printing.line(console, (direction, "bold"), f" {rest}")
        if graph.engine is not None:
            printing.line(console, f"  engine     {graph.engine}")
            exactly = "" if (graph.workspace or 0) < 1024 else f" ({graph.workspace:,} bytes)"
            printing.line(console, f"  workspace  {printing.byte_text(graph.workspace)}{exactly}")
        for remedy in graph.remedies:
            printing.line(console, f"  remedy     {remedy}")
    printing.line(console, ("runs: ", "bold"), explanation.runs)


# ----------------------------------------------------------------------------------------- doctor


@main.command()
@_as_json
def doctor(as_json: bool) -> None:
    """Shows what cuDNN attention finds here, what stands in its way, and how to repair it.

    Versions, libraries on disk and loaded, the driver, GPUs and the switches in force; then a
    judgement on each, with what to run or set where one is bad. Nothing is changed. Exits with 1
    if anything keeps cuDNN attention from working; a missing GPU does not.

    \b
    Examples:
      cudnn-mha doctor
      cudnn-mha doctor --json | jq '.findings[] | select(.level != "ok")'
    """
    from cudnn_mha.doctor import collect

    report = collect()
    if as_json:
        printing.print_json(report.to_dict())
    else:
        _show_report(report)
    _exit(failed=report.failed)


def _show_report(report: Report) -> None:
    console = printing.console()
    facts = report.facts
    console.print(printing.table("Versions", _version_rows(facts), "what", "version"))
    libraries = [(lib.name, "yes" if lib.loaded else "no", lib.folder) for lib in facts.libraries]
    console.print(printing.table("Libraries", libraries, "name", "loaded", "directory"))
    gpus = [
        (str(gpu.index), gpu.name, f"sm_{gpu.sm}", printing.byte_text(gpu.memory))
        for gpu in facts.gpus
    ]
    if gpus:
        console.print(printing.table("GPUs", gpus, ">index", "name", "architecture", ">memory"))
    torchs = {True: "on", False: "off", None: "-"}[facts.sdp_enabled]
    switches = [*facts.variables.items(), ("torch.backends.cuda.cudnn_sdp_enabled()", torchs)]
    console.print(printing.table("Switches in force", switches, "name", "value"))
    for finding in report.findings:
        _show_finding(console, finding)
    for probe, reason in facts.errors.items():
        printing.line(
            console, ("note", "dim"), (f" {probe}: ", "bold"), f"could not be asked ({reason})"
        )
    if report.failed:
        printing.line(console, ("cuDNN attention cannot work here", "bold red"))
    else:
        warned = sum(finding.level == "warn" for finding in report.findings)
        printing.line(console, ("nothing is broken", "bold green"), f"; warnings: {warned}")


def _version_rows(facts: Facts) -> list[tuple[str, str]]:
    versions = facts.versions
    rows = {
        "cudnn_mha": versions.cudnn_mha,
        "Python": versions.python,
        "platform": versions.platform,
        "torch": versions.torch,
        "CUDA of torch": versions.torch_cuda,
        "cuDNN frontend": versions.frontend,
        "cuDNN as torch sees it": _cudnn_text(versions.torch_cudnn),
        "cuDNN as the frontend sees it": _cudnn_text(versions.frontend_cudnn),
        "CUDA of cuDNN": versions.cudnn_cuda,
        "CUDA of the driver": facts.driver,
        **facts.distributions,
    }
    return [(name, version or "-") for name, version in rows.items()]


def _cudnn_text(version: int | None) -> str | None:
    return None if version is None else config.version_text(version)


def _show_finding(console: Console, finding: Finding) -> None:
    style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[finding.level]
    subject = (f" {finding.subject}: ", "bold")
    printing.line(console, (f"{finding.level:4}", style), subject, finding.message)
    if finding.remedy:
        printing.line(console, "     remedy: ", (finding.remedy, "cyan"))


# ------------------------------------------------------------------------------------------- demo


@main.command()
@click.option(
    "--gpu",
    type=GPUS,
    help="Describe this GPU and run nothing on one. Default: run on the GPU of this machine, "
    "or describe h200 where there is none.",
)
@_as_json
def demo(gpu: str | None, as_json: bool) -> None:
    """Shows cuDNN attention at work, on a machine with a GPU or without one.

    With a CUDA GPU, representative calls run forward and backward through cuDNN, are checked
    against the mathematics in float64 and timed against PyTorch's own backends.

    Without a GPU, or with --gpu, the same calls are compiled by cuDNN for a described GPU, and
    smaller ones are computed by PyTorch on the CPU and checked in the same way.

    Times are milliseconds of device time, errors are relative: |result - reference| divided by
    |reference|. Exits with 1 if a value is wrong or cuDNN does not serve a call.

    \b
    Examples:
      cudnn-mha demo
      cudnn-mha demo --gpu b200
      cudnn-mha demo --json | jq '.calls[] | {name, error}'
    """
    from cudnn_mha.demo import demonstrate, show

    with _usage():
        config.settings()
    outcome = demonstrate(gpu)
    if as_json:
        printing.print_json(outcome.to_dict())
    else:
        show(outcome)
    _exit(failed=outcome.failed)
