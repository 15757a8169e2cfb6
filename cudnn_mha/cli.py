"""The command line: ``cudnn-mha demo``, ``doctor``, ``check``, ``compile`` and ``cache``.

Importing this module loads neither torch nor cuDNN, so that ``--help`` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from cudnn_mha import __version__, config, devices, printing
from cudnn_mha.arguments import (
    DTYPES,
    GPUS,
    MASK_DTYPES,
    as_json_option,
    bhsd,
    call_options,
    exit_with,
    lengths_before_heads,
    require_no_mask,
    shape_of,
    usage_errors,
    workspace_limit_option,
)
from cudnn_mha.cli_plans import cache_group, compile_plans
from cudnn_mha.errors import CudnnUnavailableError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cudnn_mha.doctor import Facts, Finding, Report
    from cudnn_mha.explanation import Explanation


_UNWRITABLE = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE}


class _Commands(click.Group):
    """Gives what stands in the way of every command a message in place of a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            try:
                return super().main(*args, **options)
            finally:
                if sys.stdout is not None:  # as it is where the shell closed it
                    sys.stdout.flush()
        except OSError as error:
            if error.errno not in _UNWRITABLE or error.filename is not None:
                raise  # it has to do with something else than the output
            _drop_output()
            if not isinstance(error, BrokenPipeError):
                with contextlib.suppress(OSError):  # it may be standard error itself
                    click.echo(f"Error: the output cannot be written: {error}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _without_numpy():
                return super().invoke(ctx)
        except CudnnUnavailableError as error:
            raise click.ClickException(str(error)) from error
        except ImportError as error:
            raise click.ClickException(
                f"{error}; `cudnn-mha doctor` shows what is wrong"
            ) from error


def _drop_output() -> None:
    """Keeps the interpreter from writing, as it exits, what cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            continue
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def _without_numpy() -> Iterator[None]:
    """Ignores torch's warning that NumPy is not installed: no command needs it."""
    message, options = "Failed to initialize NumPy", sys.warnoptions[:]
    sys.warnoptions.append(f"ignore:{message}:UserWarning")  # for processes that are spawned
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message, UserWarning)
            yield
    finally:
        sys.warnoptions[:] = options


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cudnn-mha", message="%(prog)s %(version)s")
def main() -> None:
    """Attention for PyTorch through cuDNN.

    Every command exits with 0 for yes or done, 1 for no or failed, 2 for a call that makes no
    sense. Environment variables are described in the README and shown by `doctor`.
    """


main.add_command(compile_plans)
main.add_command(cache_group)


# ------------------------------------------------------------------------------------------ check


@main.command()
@click.option("--gpu", type=GPUS, help="The GPU to ask for. Default: the one of this machine.")
@call_options(bhsd, shape_of, required=True)
@workspace_limit_option
@as_json_option
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
    layout: str,
    lengths: bool,
    alignment: str,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi: bool,
    slopes: bool,
    sinks: bool,
    workspace_limit: str | None,
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
      cudnn-mha check --gpu h200 --q 8,32,8192,128 --causal --window 1023,0 --sinks --backward
      cudnn-mha check --gpu a10 --q 1,8,1,128 --kv 1,8,8192,128 --workspace-limit 64MiB --json
    """
    require_no_mask(mask, causal)
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
        return lengths_before_heads(shape, of_dtype) if layout == "bshd" else shape

    with usage_errors():
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
            seq_lens_q=lengths,
            seq_lens_kv=lengths,
            causal_alignment=alignment,
            window=window,
            alibi=alibi,
            alibi_slopes=slopes,
            softcap=softcap,
            sinks=sinks,
            dtype=of_dtype,
            mask_dtype=getattr(torch, MASK_DTYPES[mask_dtype]),
            requires_grad=backward,
            gpu=gpu,
        )
    if as_json:
        printing.print_json(explanation.to_dict())
    else:
        _show_explanation(explanation)
    exit_with(failed=not explanation.served)


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
    if explanation.lengths is not None:
        printing.line(console, ("lengths: ", "bold"), explanation.lengths)
    printing.line(console, ("runs: ", "bold"), explanation.runs)


# ----------------------------------------------------------------------------------------- doctor


@main.command()
@as_json_option
def doctor(as_json: bool) -> None:
    """Shows what cuDNN attention finds here, what stands in its way, and how to repair it.

    Versions, libraries on disk and loaded, the driver, GPUs, the switches in force and the folders
    of plans; then a judgement on each, with what to run or set where one is bad. Nothing is
    changed. Exits with 1 if anything is broken that cuDNN attention needs. A missing GPU is no
    fault, nor is a switch that you set, such as TORCH_CUDNN_MHA_DISABLED: both are warnings.

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
    exit_with(failed=report.failed)


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
    ours, provider = None, "-"
    if facts.drop_in is not None:
        ours, provider = facts.drop_in.enabled, facts.drop_in.provider
    switches = [
        *facts.variables.items(),
        ("torch.backends.cuda.cudnn_sdp_enabled()", _switch_text(facts.sdp_enabled)),
        ("cudnn_mha.status().enabled", _switch_text(ours)),
        ("cudnn_mha.status().provider", provider),
    ]
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


def _switch_text(state: bool | None) -> str:
    return "-" if state is None else "on" if state else "off"


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
@as_json_option
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

    with usage_errors():
        config.settings()
    outcome = demonstrate(gpu)
    if as_json:
        printing.print_json(outcome.to_dict())
    else:
        show(outcome)
    exit_with(failed=outcome.failed)
