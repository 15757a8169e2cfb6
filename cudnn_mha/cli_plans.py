"""The commands for plans that outlive their process: ``compile`` and ``cache``."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from cudnn_mha import config, devices, printing
from cudnn_mha.arguments import (
    DTYPES,
    GPUS,
    MASK_DTYPES,
    as_json_option,
    call_options,
    exit_with,
    lengths_before_heads,
    require_no_mask,
    usage_errors,
    workspace_limit_option,
)
from cudnn_mha.checks import MAX_ELEMENTS
from cudnn_mha.store import Found, Store

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cudnn_mha.precompile import Outcome
    from cudnn_mha.spec import AttentionSpec

MOST_CALLS = 100_000

_TABLE_WIDTH = 100
"""In a narrower terminal the columns of `cache list` would be a few letters wide each."""

# ---------------------------------------------------------------------------------------- compile

_PLACES = {
    "query": ("B", "HQ", "SQ", "D"),
    "key": ("B", "HKV", "SKV", "D"),
    "value": ("B", "HV", "SKV", "DV"),
}
_NAMES = frozenset(itertools.chain(*_PLACES.values()))

Places = tuple[Sequence[int] | str, ...]
"""For each number of a shape those that it takes, or the name of an earlier one that it equals."""


def _places(text: str) -> Places:
    """The shapes of ``4,32,128:4096:128,64/128``, or of ``1,1,SQ,SKV``."""
    return tuple(_place(part.strip()) for part in text.split(","))


def _bhsd_places(text: str) -> Places:
    """The shapes of query, key or value."""
    places = _places(text)
    if len(places) not in (3, 4):
        raise click.BadParameter(f"{text!r} must have 4 numbers B,H,S,D or 3 H,S,D")
    return places


def _place(text: str) -> Sequence[int] | str:
    if text.upper() in _NAMES:
        return text.upper()
    numbers: list[int] = []
    for part in text.split("/"):
        match = re.fullmatch(r"(\d+)(?::(\d+)(?::(\d+))?)?", part, re.ASCII)
        if match is None:
            raise click.BadParameter(
                f"{text!r} is no whole number, nor several such as 1/2/4, nor a range "
                f"first:last:step, nor one of {', '.join(sorted(_NAMES))}"
            )
        first, last, step = (int(number or 0) for number in match.groups())
        if match[2] is None:
            last = first
        if last < first or (match[3] and not step):
            raise click.BadParameter(f"the range {part!r} is empty")
        run = range(first, last + 1, step or 1)
        if len(run) > MOST_CALLS:
            raise click.BadParameter(f"{part!r} are more than {MOST_CALLS:,} numbers")
        numbers += run
    return numbers


def _shapes(given: Mapping[str, Places]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Every combination of the numbers given, as shapes by the names of the tensors."""
    choices: list[Sequence[int | str]] = [
        [place] if isinstance(place, str) else place for place in itertools.chain(*given.values())
    ]
    count = math.prod(map(len, choices))
    if count > MOST_CALLS:
        raise click.UsageError(f"these are {count:,} calls, more than {MOST_CALLS:,}")
    for taken in itertools.product(*choices):
        numbers = iter(taken)
        known: dict[str, int] = {}
        shapes = {}
        for tensor, each in given.items():
            names = _PLACES.get(tensor, ("",) * len(each))[-len(each) :]
            shape = []
            for name, number in zip(names, numbers, strict=False):
                if isinstance(number, str) and number not in known:
                    raise click.UsageError(f"{number} is used before any shape gives it")
                extent = known[number] if isinstance(number, str) else number
                shape.append(extent)
                known.setdefault(name, extent)
            shapes[tensor] = tuple(shape)
        yield shapes


def _specs(
    gpus: Sequence[str],
    query: Places,
    key: Places | None,
    value: Places | None,
    mask: Places | None,
    **call: Any,
) -> list[AttentionSpec]:
    """The graphs of every combination of shapes on these GPUs."""
    import torch

    from cudnn_mha.explanation import Asked, given_operands
    from cudnn_mha.inputs import Options
    from cudnn_mha.precompile import extended_specs, specs_of
    from cudnn_mha.terms import asks_more, make_terms

    require_no_mask(mask, call["causal"])
    count = len(query)
    given = {"query": query}
    given["key"] = key or _PLACES["query"][-count:]
    given["value"] = value or ("B", "HKV", "SKV", "D")[-count:]
    if mask is not None:
        given["mask"] = mask
    of_dtype = getattr(torch, DTYPES[call["dtype"]])
    mask_dtype = getattr(torch, MASK_DTYPES[call["mask_dtype"]])

    operands = given_operands(
        seq_lens_q=call["lengths"],
        seq_lens_kv=call["lengths"],
        alibi_slopes=call["slopes"],
        sinks=call["sinks"],
    )
    asks = (call["alignment"], call["window"], call["softcap"], call["alibi"] or call["slopes"])
    more, terms = asks_more(*asks, *operands), make_terms(call["causal"], *asks)

    def tensor(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
        if math.prod(shape) > MAX_ELEMENTS:
            raise click.UsageError(f"{shape} has more elements than any GPU's memory")
        if layout == "bshd":
            return lengths_before_heads(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")

    found: dict[AttentionSpec, None] = {}
    for shapes in _shapes(given):
        q, k, v = (
            tensor(shapes[name], of_dtype, call["layout"]) for name in ("query", "key", "value")
        )
        own = shapes.get("mask")
        bias = None if own is None else tensor(own, mask_dtype, "bhsd")
        gqa = call["gqa"]
        options = Options(
            call["dropout"],
            call["causal"],
            call["scale"],
            not q.shape[-3] == k.shape[-3] == v.shape[-3] if gqa is None else gqa,
            call["lse"],
            call["deterministic"],
        )
        for gpu in gpus:
            device, gradient = devices.described(gpu), call["backward"]
            if more:
                given_call = Asked({}, operands, of_dtype, gradient, gpu).call(q, k, v, bias)
                specs = extended_specs(given_call, options, terms, device, gradient=gradient)
            else:
                specs = specs_of(q, k, v, bias, options, device, gradient=gradient)
            found |= dict.fromkeys(specs)
    return list(found)


@click.command("compile")
@click.option(
    "--gpu", "gpus", type=GPUS, multiple=True, required=True, help="For this GPU; may be repeated."
)
@click.option(
    "--from",
    "recordings",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="For the calls of a recording, or of a folder with recordings; may be repeated.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="FOLDER",
    help="Where the plans go; what is there already is kept.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of processes. Default: as many as there is work for, at most one for each core.",
)
@call_options(_bhsd_places, _places, required=False)
@workspace_limit_option
@as_json_option
def compile_plans(
    gpus: tuple[str, ...],
    recordings: tuple[Path, ...],
    out: Path,
    jobs: int | None,
    workspace_limit: str | None,
    as_json: bool,
    **call: Any,
) -> None:
    """Compiles plans ahead of time, without a GPU.

    A process finds them with TORCH_CUDNN_MHA_PLANS=FOLDER or cudnn_mha.load_plans(FOLDER), on the
    GPUs that are named here, with the versions of cuDNN and of its frontend that are installed
    here, for calls with the same workspace limit.

    The calls are those of recordings (TORCH_CUDNN_MHA_RECORD=FILE python train.py), those that
    the options describe as in `check`, or both. In the shapes each number may also be several
    (1/2/4), a range (128:4096:128, the last one included), both (1/128:4096:128), or the name of
    a number before it that it equals (SQ). All combinations are compiled. The gradient of the
    output is taken to be laid out like the output; a recording knows better.

    Calls that cuDNN refuses are listed, and are no failure. Exits with 1 if there is no plan in
    the end.

    \b
    Examples:
      cudnn-mha compile --gpu h200 --gpu b200 --from calls.jsonl --out plans/
      cudnn-mha compile --gpu h200 --q 1/8,32,128:4096:128,128 --kv B,8,SQ,D --causal --out plans/
      cudnn-mha compile --gpu a10 --q 8,16,512,64 --mask B,1,1,SKV --backward --json --out plans/
    """
    if call["query"] is None:
        _refuse_options_without_shape(call)
        if not recordings:
            raise click.UsageError("calls must come from --from, from --q, or from both")

    from cudnn_mha import precompile, recording, runtime

    runtime.library()
    with usage_errors():
        limit = config.parse_bytes(workspace_limit or config.settings().workspace_limit)
        specs = recording.read(recordings)
        if call["query"] is not None:
            specs = list(dict.fromkeys([*specs, *_specs(gpus, **call)]))
    gpus = tuple(dict.fromkeys(gpus))
    with _progress(len(specs) * len(gpus)) as advance, _failing():
        outcomes = precompile.compile_ahead(
            specs, gpus, out, workspace_limit=limit, jobs=jobs, progress=advance
        )
    tallies = [_tally(gpu, [each for each in outcomes if each.gpu == gpu]) for gpu in gpus]
    if as_json:
        found = [outcome.to_dict() for outcome in outcomes]
        printing.print_json({"folder": str(out), "gpus": tallies, "outcomes": found})
    else:
        _show_outcomes(out, tallies, outcomes)
    exit_with(failed=not any(tally["plans"] for tally in tallies))


def _refuse_options_without_shape(call: Mapping[str, Any]) -> None:
    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in call and source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]} describes a call only together with --q")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Outcome], None]]:
    """A bar on a terminal; gives what moves it on."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    console = printing.console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("compiling", total=total)
        yield lambda outcome: progress.update(task, advance=1, description=outcome.gpu)


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """What keeps plans from being compiled or kept becomes a message."""
    from concurrent.futures import BrokenExecutor

    try:
        yield
    except BrokenExecutor as error:
        raise click.ClickException(
            f"{error} Perhaps memory ran out: take fewer --jobs. Plans made before it are kept."
        ) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error


def _tally(gpu: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    plans = [outcome for outcome in outcomes if outcome.engine is not None]
    return {
        "gpu": gpu,
        "plans": len(plans),
        "new": sum(outcome.seconds > 0 for outcome in plans),
        "refusals": len(outcomes) - len(plans),
        "bytes": sum(outcome.size for outcome in plans),
        "seconds": sum(outcome.seconds for outcome in outcomes),
    }


def _show_outcomes(
    folder: Path, tallies: Sequence[Mapping[str, Any]], outcomes: Sequence[Outcome]
) -> None:
    console = printing.console()
    rows = [
        (
            str(tally["gpu"]),
            *(f"{tally[name]:,}" for name in ("plans", "new", "refusals")),
            printing.byte_text(tally["bytes"]),
            printing.number_text(tally["seconds"], ".1f"),
        )
        for tally in tallies
    ]
    headings = ("GPU", ">plans", ">new", ">refusals", ">size", ">seconds")
    console.print(printing.table(f"Plans in {folder}", rows, *headings))
    for outcome in outcomes:
        if outcome.engine is None:
            printing.line(console, ("refused", "yellow"), f" {outcome.gpu}: {outcome.spec}")
            for reason in outcome.reasons:
                printing.line(console, ("  reason: ", "bold"), reason)
    if not any(tally["plans"] for tally in tallies):
        printing.line(console, ("no plan was compiled", "bold red"))


# ------------------------------------------------------------------------------------------ cache


@click.group("cache")
def cache_group() -> None:
    """Plans on disk: what is there, whether it is sound, and removing it.

    Compiled plans outlive a process in the folder TORCH_CUDNN_MHA_CACHE_DIR; with --dir the
    commands look into another one, such as one that `compile` filled.
    """


_folder = click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, readable=False, path_type=Path),
    metavar="FOLDER",
    help="The folder to look into. Default: the one in force.",
)


def _store(folder: Path | None, *, read_only: bool = True) -> Store:
    if folder is None:
        with usage_errors():
            folder = config.settings().cache_dir
    if folder is None:
        raise click.UsageError(
            f"{config.CACHE_DIR}=off keeps no plans on disk; name a folder with --dir"
        )
    return Store(folder, read_only=read_only)


@cache_group.command("list")
@_folder
@as_json_option
def cache_list(folder: Path | None, as_json: bool) -> None:
    """Lists the plans on disk and cuDNN's refusals, the last used first.

    A use is written down every ten minutes at most.

    \b
    Examples:
      cudnn-mha cache list
      cudnn-mha cache list --dir plans/ --json | jq '.entries[] | select(.refusal) | .graph'
    """
    store = _store(folder)
    found = list(store.inspect())[::-1]
    problem = store.problem()
    if as_json:
        entries = [_summary(each) for each in found]
        facts: dict[str, Any] = {"folder": str(store), "problem": problem}
        facts |= {"bytes": sum(each.size for each in found), "entries": entries}
        printing.print_json(facts)
        return
    console = printing.console()
    if found:
        headings = ("key", "GPU", "direction", "spec", "engine or refusal", ">size", "last used")
        rows, narrow = [_row(each) for each in found], console.width < _TABLE_WIDTH
        console.print(
            printing.records(rows, *headings) if narrow else printing.table(None, rows, *headings)
        )
    if problem is not None:
        printing.line(console, ("unusable ", "bold red"), problem, fold=True)
    _show_total(console, store, found)


def _summary(found: Found) -> dict[str, Any]:
    facts: dict[str, Any] = {"key": found.name, "file": str(found.path), "problem": found.problem}
    facts |= {"bytes": found.size, "last_used": _when(found).isoformat(timespec="seconds")}
    entry = found.entry
    if entry is not None:
        facts |= {"gpu_name": entry.gpu, "direction": entry.spec.direction.value}
        facts |= {"graph": str(entry.spec), "engine": entry.engine, "workspace": entry.workspace}
        facts["refusal"] = None if entry.refusal is None else str(entry.refusal)
    return facts


def _row(found: Found) -> tuple[str, ...]:
    entry = found.entry
    used = _when(found).astimezone().strftime("%Y-%m-%d %H:%M")
    size = printing.byte_text(found.size)
    if entry is None:
        return (found.name[:12], "-", "-", "-", f"unusable: {found.problem}", size, used)
    direction, _, spec = str(entry.spec).partition(" ")
    result = str(entry.refusal or entry.engine)
    return (found.name[:12], entry.gpu, direction, spec, result, size, used)


def _when(found: Found) -> datetime:
    return datetime.fromtimestamp(found.used, timezone.utc)


def _show_total(console: Console, store: Store, found: Sequence[Found]) -> None:
    size = printing.byte_text(sum(each.size for each in found))
    printing.line(console, (f"{store}: ", "bold"), f"{_files(len(found))}, {size}", fold=True)


def _files(count: int) -> str:
    return f"{count:,} file" + ("" if count == 1 else "s")


@cache_group.command("show")
@click.argument("key")
@_folder
@as_json_option
def cache_show(key: str, folder: Path | None, as_json: bool) -> None:
    """Shows everything that is known of one plan on disk.

    KEY is what `list` shows, or as much of it as is needed to tell it from the others. Exits with
    1 if there is none or it cannot be used.

    \b
    Examples:
      cudnn-mha cache show 3fa9
      cudnn-mha cache show 3fa9 --dir plans/ --json | jq .workspace
    """
    store = _store(folder)
    matching = [each for each in store.inspect() if each.name.startswith(key.lower())]
    if not matching:
        raise click.ClickException(f"{store} has no plan whose key begins with {key}")
    if len(matching) > 1:
        names = ", ".join(sorted(each.name[:12] for each in matching[:10]))
        raise click.UsageError(f"{len(matching)} keys begin with {key}: {names}")
    (found,) = matching
    facts = _summary(found)
    if found.entry is not None:
        facts |= {**found.entry.key, "plan_bytes": len(found.entry.blob)}
    if as_json:
        printing.print_json(facts)
    else:
        console = printing.console()
        for name, value in _flat(facts):
            printing.line(console, (f"{name:20}", "bold"), f" {value}")
    exit_with(failed=found.problem is not None)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of nested facts that are set."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else value


@cache_group.command("clear")
@_folder
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json_option
def cache_clear(folder: Path | None, yes: bool, as_json: bool) -> None:
    """Removes every plan on disk, after asking.

    Processes that run keep the plans that they have. Where nobody can be asked --yes is needed.

    \b
    Examples:
      cudnn-mha cache clear
      cudnn-mha cache clear --dir plans/ --yes --json
    """
    store = _store(folder, read_only=False)
    count = len(store.files())
    if not yes and count:
        if not _can_ask():
            raise click.UsageError("nobody can be asked here; give --yes")
        click.confirm(f"Remove {_files(count)} from {store}?", abort=True, err=True)
    removed, size = store.clear()
    left = len(store.files())
    if as_json:
        facts = {"folder": str(store), "removed": removed, "bytes": size, "left": left}
        printing.print_json(facts)
    else:
        console = printing.console()
        text = f"removed {_files(removed)}, {printing.byte_text(size)}"
        if left:
            text += f"; {_files(left)} could not be removed"
        printing.line(console, (f"{store}: ", "bold"), text)
    exit_with(failed=left > 0)


def _can_ask() -> bool:
    return sys.stdin.isatty()


@cache_group.command("verify")
@_folder
@as_json_option
def cache_verify(folder: Path | None, as_json: bool) -> None:
    """Reads and checks every plan on disk: its form, checksum, name, and who may write it.

    The folder itself must be readable too, and no other user may write it. What is wrong with a
    file is said and nothing is removed; a call that needs it replaces it. Exits with 1 if anything
    is wrong; a folder without plans is not.

    \b
    Examples:
      cudnn-mha cache verify
      cudnn-mha cache verify --dir plans/ --json | jq '.problems[].file'
    """
    store = _store(folder)
    found = list(store.inspect())
    bad = [each for each in found if each.problem is not None]
    problem = store.problem()
    if as_json:
        size = sum(each.size for each in found)
        problems = [{"file": str(each.path), "problem": each.problem} for each in bad]
        facts = {"folder": str(store), "problem": problem, "files": len(found), "bytes": size}
        printing.print_json(facts | {"problems": problems})
    else:
        console = printing.console()
        if problem is not None:
            printing.line(console, ("wrong ", "bold red"), problem)
        for each in bad:
            printing.line(console, ("wrong ", "bold red"), f"{each.path}: {each.problem}")
        _show_total(console, store, found)
        verdict = ("all sound", "green") if found else ("there is no plan in it", "yellow")
        if problem is not None:
            verdict = ("nothing in this folder can be used", "bold red")
        elif bad:
            verdict = (f"{_files(len(bad))} of no use", "bold red")
        printing.line(console, verdict)
    exit_with(failed=bool(bad) or problem is not None)
