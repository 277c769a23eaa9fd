"""report.html: one file without any network access, pictures first."""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from pathlib import Path

from clusterkv_ops.profiling.pictures import bars, hit_rates, lane_pictures, shares
from clusterkv_ops.profiling.report import Report
from clusterkv_ops.profiling.svg import draw_bars, draw_curve, draw_lanes, draw_shares
from clusterkv_ops.profiling.tables import Table, tables
from clusterkv_ops.profiling.theme import COLOURS, pattern_definitions, stylesheet
from clusterkv_ops.profiling.timeline import Timeline

_STATIC = Path(__file__).parent / "static"


def render_page(report: Report, timeline: Timeline | None = None) -> str:
    """The report as HTML. Without a timeline (a report read from JSON) the lanes are left out."""
    sections = [_lanes(timeline)] if timeline is not None else []
    sections += [_shares(report), _bars(report), _curve(report)]
    sections += [html_table(table) for table in tables(report)]
    sections += [html_table(table) for table in tables(report, by="lane")]
    return document(report.headline, _head(report) + "".join(sections))


def document(title: str, body: str) -> str:
    """A page in the report's style."""
    style = stylesheet() + (_STATIC / "report.css").read_text()
    script = (_STATIC / "report.js").read_text()
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f'{pattern_definitions()}{body}<div id="tip"></div><script>{script}</script>'
        "</body></html>\n"
    )


def head(title: str, meta: str) -> str:
    """The top of a page: what it is about, its sentence, and the switch of the theme."""
    return (
        f'<div class="top"><div><p class="meta">{escape(meta)}</p><h1>{escape(title)}</h1></div>'
        '<button id="theme" title="light or dark">theme</button></div>'
    )


def _head(report: Report) -> str:
    facts = [str(report.trace[key]) for key in ("file", "device") if report.trace.get(key)]
    for name in ("model", "context", "budget"):
        if name in report.counters:
            facts.append(f"{name} {report.counters[name]}")
    warnings = "".join(f'<div class="warning">{escape(text)}</div>' for text in report.warnings)
    phases = {row.phase for row in report.phases}
    return head(report.headline, ", ".join(facts)) + warnings + legend(phases)


def legend(phases: Collection[str]) -> str:
    """What the colours and patterns mean."""
    keys = [
        f'<span><svg viewBox="0 0 22 14"><rect class="f-{phase}" width="22" height="14"/></svg>'
        f"{phase}</span>"
        for phase in COLOURS
        if phase in phases
    ]
    red = (
        '<span><svg viewBox="0 0 22 14"><rect class="exposed" width="22" height="14"/>'
        '<rect class="exposed-edge" width="22" height="3"/></svg>'
        "overhead runs and no model compute does</span>"
    )
    return f'<div class="legend">{"".join(keys)}{red}</div>'


def _lanes(timeline: Timeline) -> str:
    return "".join(
        f"<section><h2>{escape(picture.title)}</h2>{draw_lanes(picture)}</section>"
        for picture in lane_pictures(timeline)
    )


def _shares(report: Report) -> str:
    rows = [(row.mode, shares(report, row.mode)) for row in report.modes]
    return f"<section><h2>Where the wall time goes</h2>{draw_shares(rows)}</section>"


def _bars(report: Report) -> str:
    found = bars(report)
    if not found:
        return ""
    title = "Overhead: hidden under the model, exposed with a red edge"
    return f"<section><h2>{title}</h2>{draw_bars(found)}</section>"


def _curve(report: Report) -> str:
    points = hit_rates(report)
    if len(points) < 2:
        return ""
    curve = draw_curve(points, "Hit rate of the recall cache")
    return f"<section><h2>Hit rate of the recall cache</h2>{curve}</section>"


def html_table(table: Table) -> str:
    """A table with its title."""

    def cells(line: list[str], tag: str) -> str:
        return "".join(
            f"<{tag}{_text_class(table, i)}>{escape(cell)}</{tag}>" for i, cell in enumerate(line)
        )

    rows = "".join(
        f"<tr{' class=sum' if row[0] in ('idle', 'wall') else ''}>{cells(row, 'td')}</tr>"
        for row in table.rows
    )
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="scroll"><table>'
        f"<tr>{cells(table.columns, 'th')}</tr>{rows}</table></div></section>"
    )


def _text_class(table: Table, column: int) -> str:
    is_text = column < table.text_columns or table.columns[column] == "phases"
    return " class=text" if is_text else ""
