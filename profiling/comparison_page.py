"""Two reports side by side, as a page of the ClusterKV tab."""

from __future__ import annotations

from html import escape

from clusterkv_ops.profiling.headline import milliseconds, share
from clusterkv_ops.profiling.page import document, head, html_table, legend
from clusterkv_ops.profiling.phases import SHOWN
from clusterkv_ops.profiling.pictures import Share, shares
from clusterkv_ops.profiling.report import Report
from clusterkv_ops.profiling.svg import draw_shares
from clusterkv_ops.profiling.tables import Table


def render_comparison(left: Report, right: Report, left_name: str, right_name: str) -> str:
    """Shares of the wall below each other, and a table of every phase in both."""
    modes = [row.mode for row in left.modes if right.mode(row.mode)]
    phases = {row.phase for report in (left, right) for row in report.phases}
    title = f"{left_name} against {right_name}"
    sentences = "".join(
        f"<p><b>{escape(name)}</b>: {escape(report.headline)}</p>"
        for name, report in ((left_name, left), (right_name, right))
    )
    body = head(title, "ClusterKV, two runs") + sentences + legend(phases)
    for mode in modes:
        bars: list[tuple[str, list[Share]]] = [
            (_short(left_name), shares(left, mode)),
            (_short(right_name), shares(right, mode)),
        ]
        body += f"<section><h2>{mode}</h2>{draw_shares(bars)}</section>"
        body += html_table(comparison_table(left, right, mode))
    return document(title, body)


def comparison_table(left: Report, right: Report, mode: str) -> Table:
    """Every phase of a mode: exposed and hidden in both runs, for each call."""
    columns = ["phase", "exposed", "exposed", "difference", "hidden", "hidden", "MB", "MB"]
    rows = []
    calls = [max(row.calls, 1) if row else 1 for row in (left.mode(mode), right.mode(mode))]
    for phase in SHOWN:
        pair = (left.phase(mode, phase), right.phase(mode, phase))
        if not any(pair):
            continue
        times = [row.exposed_us / n if row else 0.0 for row, n in zip(pair, calls, strict=True)]
        hidden = [
            share(row.hidden_pct) if row and row.hidden_pct is not None else "-" for row in pair
        ]
        moved = [f"{row.bytes / 1e6:,.2f}" if row and row.bytes else "" for row in pair]
        difference = f"{(times[1] - times[0]) / 1e3:+.3f} ms"
        rows.append([phase, *map(milliseconds, times), difference, *hidden, *moved])
    whole = (left.mode(mode), right.mode(mode))
    walls = [row.wall_us / n if row else 0.0 for row, n in zip(whole, calls, strict=True)]
    difference = f"{(walls[1] - walls[0]) / 1e3:+.3f} ms"
    rows.append(["wall", *map(milliseconds, walls), difference, "", "", "", ""])
    return Table(f"{mode}: the first run, then the second, a call", columns, rows)


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"...{name[-19:]}"
