"""The report's tables as plain cells: what the terminal, Markdown and HTML have in common."""

from __future__ import annotations

from typing import NamedTuple

from clusterkv_ops.profiling.headline import UNRELIABLE, milliseconds, share
from clusterkv_ops.profiling.phases import OVERHEAD
from clusterkv_ops.profiling.report import Report


class Table(NamedTuple):
    """A titled table; the first `text_columns` columns are text, the others numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1


BY = ("phase", "step", "layer", "lane")


def tables(report: Report, by: str = "phase", mode: str = "all") -> list[Table]:
    """Every table with rows, cut by phase, step, layer or lane; "all" shows each mode."""
    modes = [row.mode for row in report.modes] if mode == "all" else [mode]
    if mode == "all" and len(modes) > 1:
        modes.remove("all")
    if by == "step":
        found = [_steps(report, name) for name in modes]
    elif by == "layer":
        found = [_layers(report, name) for name in modes]
    elif by == "lane":
        found = [_lanes(report, name) for name in modes]
    else:
        found = [_phases(report, name) for name in modes]
        found += [_copies(report, modes), _waits(report, modes), _contention(report)]
    return [table for table in found if table.rows]


def _phases(report: Report, mode: str) -> Table:
    columns = [
        "phase",
        "count",
        "busy",
        "busy %",
        "hidden %",
        "exposed",
        "exposed %",
        "MB",
        "GB/s",
    ]
    rows = []
    for row in report.phases:
        if row.mode == mode:
            hidden = share(row.hidden_pct) if row.phase in OVERHEAD else "-"
            rows.append(
                [
                    row.phase,
                    f"{row.count:,}",
                    milliseconds(row.busy_us),
                    share(row.busy_pct),
                    hidden,
                    milliseconds(row.exposed_us),
                    share(row.exposed_pct),
                    _megabytes(row.bytes),
                    _speed(row.gb_per_s),
                ]
            )
    whole = report.mode(mode)
    if whole is None:
        return Table(mode, columns, [])
    idle = [milliseconds(whole.idle_us), share(whole.idle_pct)]
    rows.append(["idle", "", "", "", "", *idle, "", ""])
    wall = UNRELIABLE if whole.unreliable else "100 %"
    rows.append(["wall", "", "", "", "", milliseconds(whole.wall_us), wall, "", ""])
    return Table(_mode_title(report, mode), columns, rows)


def _copies(report: Report, modes: list[str]) -> Table:
    columns = ["copies", "mode", "count", "MB", "busy", "under kernels", "GB/s"]
    rows = [
        [
            row.kind + (" !" if row.is_pageable else ""),
            row.mode,
            f"{row.count:,}",
            _megabytes(row.bytes),
            milliseconds(row.busy_us),
            share(row.hidden_pct),
            _speed(row.gb_per_s),
        ]
        for row in report.copies
        if row.mode in modes
    ]
    return Table("Copies", columns, rows, 2)


def _waits(report: Report, modes: list[str]) -> Table:
    rows = [
        [row.waits_for, row.mode, f"{row.count:,}", milliseconds(row.wait_us), share(row.wait_pct)]
        for row in report.waits
        if row.mode in modes
    ]
    return Table("What the main lane waited for", ["cause", "mode", "count", "time", "%"], rows, 2)


def _contention(report: Report) -> Table:
    columns = ["main lane", "alone", "overlapped", "mean alone", "mean overlapped", "slower by"]
    rows = [
        [
            row.name[:48],
            f"{row.alone:,}",
            f"{row.overlapped:,}",
            milliseconds(row.alone_us),
            milliseconds(row.overlapped_us),
            f"{row.slowdown_pct:+.1f} %",
        ]
        for row in report.contention
    ]
    return Table("Contention: the same work alone and beside another lane", columns, rows)


def _steps(report: Report, mode: str) -> Table:
    rows_of_mode = [row for row in report.steps if row.mode == mode]
    phases = [p for p in OVERHEAD if any(p in row.exposed_us for row in rows_of_mode)]
    columns = ["step", "start", "wall", *[f"{phase} exposed" for phase in phases], "idle"]
    rows = [
        [
            str(row.step),
            milliseconds(row.start_us),
            milliseconds(row.wall_us),
            *[milliseconds(row.exposed_us.get(phase, 0)) for phase in phases],
            milliseconds(row.idle_us),
        ]
        for row in rows_of_mode
    ]
    return Table(_mode_title(report, mode), columns, rows)


def _layers(report: Report, mode: str) -> Table:
    rows = [
        [
            str(row.layer),
            row.phase,
            f"{row.count:,}",
            milliseconds(row.busy_us),
            milliseconds(row.exposed_us),
        ]
        for row in report.layers
        if row.mode == mode
    ]
    columns = ["layer", "phase", "count", "busy", "exposed"]
    return Table(_mode_title(report, mode), columns, rows, 2)


def _lanes(report: Report, mode: str) -> Table:
    rows = [
        [
            row.lane,
            row.role,
            f"{row.count:,}",
            milliseconds(row.busy_us),
            share(row.busy_pct),
            ", ".join(f"{phase} {milliseconds(us)}" for phase, us in row.phases.items()),
        ]
        for row in report.lanes
        if row.mode == mode
    ]
    columns = ["lane", "role", "count", "busy", "busy %", "phases"]
    return Table(_mode_title(report, mode), columns, rows, 2)


def _mode_title(report: Report, mode: str) -> str:
    row = report.mode(mode)
    if row is None:
        return mode
    calls = f"{row.calls} calls, " if row.calls > 1 else ""
    return f"{mode}: {calls}wall {milliseconds(row.wall_us)}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f}" if size else ""


def _speed(gb_per_s: float | None) -> str:
    return f"{gb_per_s:.3g}" if gb_per_s else ""
