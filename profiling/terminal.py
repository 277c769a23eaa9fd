"""The report in the terminal: rich tables where rich is installed, else plain columns."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from clusterkv_ops.profiling.reader import Progress
from clusterkv_ops.profiling.report import Report
from clusterkv_ops.profiling.tables import Table, tables

HAS_RICH = importlib.util.find_spec("rich") is not None


def print_report(report: Report, by: str, mode: str, stream: TextIO | None = None) -> None:
    """Headline, warnings, tables."""
    stream = stream or sys.stdout
    found = tables(report, by, mode)
    if HAS_RICH:
        _print_rich(report, found, stream)
    else:
        print(plain_report(report, found), file=stream)


def print_tables(found: list[Table], stream: TextIO | None = None) -> None:
    """Tables alone."""
    stream = stream or sys.stdout
    if HAS_RICH:
        _console(stream).print(*[_rich_table(table) for table in found], sep="\n")
    else:
        print("\n\n".join(plain_table(table) for table in found), file=stream)


def plain_report(report: Report, found: list[Table]) -> str:
    """The report without rich."""
    warnings = [f"warning: {text}" for text in report.warnings]
    return "\n\n".join([report.headline, *warnings, *map(plain_table, found)])


def plain_table(table: Table) -> str:
    """Columns as wide as their widest cell."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    return "\n".join(
        [table.title]
        + [
            "  ".join(
                cell.ljust(width) if i < table.text_columns else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
    )


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar on stderr, for work of more than an instant; silent where stderr is not a terminal."""
    if not HAS_RICH or not sys.stderr.isatty():
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda share: bar.update(task, completed=share)


@contextmanager
def stage_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr whose text changes with the stage; lines where stderr is no terminal."""
    if not HAS_RICH or not sys.stderr.isatty():
        yield lambda what, done, total: print(f"{done}/{total} {what}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def _print_rich(report: Report, found: list[Table], stream: TextIO) -> None:
    from rich.text import Text

    console = _console(stream)
    console.print(Text(report.headline, style="bold"))
    for text in report.warnings:
        console.print(Text(f"warning: {text}", style="yellow"))
    for table in found:
        console.print(_rich_table(table))


def _console(stream: TextIO) -> Any:
    from rich.console import Console

    return Console(file=stream, width=None if stream.isatty() else 120)


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(table.columns):
        is_text = i < table.text_columns or name == "phases"
        drawn.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in table.rows:
        style = "dim" if row[0] in ("idle", "wall") else None
        drawn.add_row(*[Text(cell) for cell in row], style=style)
    return drawn
