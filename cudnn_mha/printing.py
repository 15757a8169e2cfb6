"""How the commands print: lines, tables, JSON and numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text


def console(*, stderr: bool = False) -> Console:
    """Where to print; texts are taken literally, without markup."""
    made = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not made.is_terminal:
        made.width = 160  # a file or a log has no width of its own
    return made


def line(to: Console, *parts: str | tuple[str, str], fold: bool = False) -> None:
    """Prints one line, parts of it in a style.

    A long one is left to the terminal to break, so that it can be copied; with ``fold`` it is
    broken at the terminal's width.
    """
    to.print(Text.assemble(*parts), soft_wrap=not (fold and to.is_terminal))


def table(title: str | None, rows: Sequence[Sequence[RenderableType]], *columns: str) -> Table:
    """A table; columns whose heading starts with ``>`` are aligned to the right."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def records(rows: Sequence[Sequence[str]], *columns: str) -> Table:
    """The same as `table` for a narrow terminal: a line for each cell, under one another."""
    made = Table.grid(
        Column(style="bold", overflow="fold"), Column(overflow="fold"), padding=(0, 1)
    )
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            made.add_row(column.lstrip(">"), cell)
        made.add_row()
    return made


def print_json(data: Mapping[str, Any]) -> None:
    """Prints JSON on standard output."""
    click.echo(json.dumps(data, indent=2, allow_nan=False))


def byte_text(count: int | None) -> str:
    """'1.5 GiB' from 1610612736."""
    if count is None:
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def number_text(value: float | None, form: str) -> str:
    """The number in that form."""
    return "-" if value is None else format(value, form)
