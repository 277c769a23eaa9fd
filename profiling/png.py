"""The report's pictures by matplotlib: separate figures, and one PNG with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterkv_ops.profiling.headline import milliseconds, share
from clusterkv_ops.profiling.pictures import (
    Bar,
    LanePicture,
    Share,
    bars,
    hit_rates,
    is_exposed,
    lane_pictures,
    shares,
)
from clusterkv_ops.profiling.report import Report
from clusterkv_ops.profiling.theme import COLOURS, EXPOSED, HATCHES, ink
from clusterkv_ops.profiling.timeline import Timeline

# Inches. TensorBoard shows a figure 350 pixels wide: a narrow one has the larger letters.
_WIDTH, _NARROW = 12.0, 6.5


def report_figures(report: Report, timeline: Timeline | None = None) -> dict[str, Any]:
    """Name -> matplotlib figure; each is readable on its own."""
    figures: dict[str, Any] = {}
    for picture in lane_pictures(timeline) if timeline is not None else []:
        name = picture.title.split(" ")[0].lower()
        figures[f"lanes_{name}"] = _one(0.9 + 0.5 * len(picture.rows), draw_lanes, picture)
    rows = [(row.mode, shares(report, row.mode)) for row in report.modes]
    figures["shares"] = _one(0.9 + 0.5 * len(rows), draw_shares, rows)
    if bars(report):
        figures["overhead"] = _one(0.9 + 0.38 * len(bars(report)), draw_bars, bars(report))
    if len(hit_rates(report)) > 1:
        figures["hit_rate"] = _one(2.6, draw_curve, hit_rates(report))
    return figures


def save_png(report: Report, timeline: Timeline | None, path: str | Path) -> None:
    """All pictures below each other, under the headline."""
    rows = [(row.mode, shares(report, row.mode)) for row in report.modes]
    parts: list[tuple[float, Any, Any]] = [
        (0.9 + 0.5 * len(picture.rows), draw_lanes, picture)
        for picture in (lane_pictures(timeline) if timeline is not None else [])
    ]
    parts.append((0.9 + 0.5 * len(rows), draw_shares, rows))
    if bars(report):
        parts.append((0.9 + 0.38 * len(bars(report)), draw_bars, bars(report)))
    if len(hit_rates(report)) > 1:
        parts.append((2.4, draw_curve, hit_rates(report)))
    _save(parts, report.headline, path)


def save_lanes_png(picture: LanePicture, path: str | Path) -> None:
    """One stretch of time."""
    _save([(0.9 + 0.5 * len(picture.rows), draw_lanes, picture)], "", path)


def draw_lanes(axes: Any, picture: LanePicture) -> None:
    """Lanes from top to bottom, red where overhead is exposed."""
    origin = picture.start
    unit, name = _unit(picture.end - origin)
    for start, end in picture.exposed:
        left, right = (start - origin) / unit, (end - origin) / unit
        axes.axvspan(left, right, color=EXPOSED[0], alpha=0.17, linewidth=0)
    for i, row in enumerate(picture.rows):
        for phase in {box.phase for box in row.boxes}:
            spans = [
                ((box.start - origin) / unit, (box.end - box.start) / unit)
                for box in row.boxes
                if box.phase == phase
            ]
            axes.broken_barh(spans, (i - 0.4, 0.8), **_style(phase))
    axes.set_yticks(range(len(picture.rows)), [f"{r.role}\n{r.name}"[:40] for r in picture.rows])
    axes.set_ylim(len(picture.rows) - 0.4, -0.6)
    axes.set_xlim(0, (picture.end - origin) / unit)
    axes.set_xlabel(name)
    axes.set_title(picture.title, loc="left", fontweight="bold")
    _legend(axes, [box.phase for row in picture.rows for box in row.boxes])


def draw_shares(axes: Any, rows: list[tuple[str, list[Share]]]) -> None:
    """One bar a mode, 100 % wide."""
    for i, (_, pieces) in enumerate(rows):
        at = 0.0
        if not pieces:
            axes.text(1, i, "unreliable", va="center")
        for piece in pieces:
            axes.barh(i, piece.percent, 0.72, left=at, **_style(piece.phase))
            if piece.percent > 6:
                _write(axes, at + piece.percent / 2, i, share(piece.percent), piece.phase)
            at += piece.percent
    axes.set_yticks(range(len(rows)), [mode for mode, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the wall")
    axes.set_title("Where the wall time goes", loc="left", fontweight="bold")
    _legend(axes, [piece.phase for _, pieces in rows for piece in pieces])


def draw_bars(axes: Any, found: list[Bar]) -> None:
    """Hidden part, then exposed part with a red edge."""
    longest = max(bar.busy_us for bar in found)
    unit, name = _unit(1e3 * longest)
    longest *= 1e3 / unit
    for i, bar in enumerate(found):
        busy = 1e3 * bar.busy_us / unit
        hidden = busy * (bar.hidden_pct or 0) / 100
        axes.barh(i, hidden, 0.7, **_style(bar.phase))
        if is_exposed(bar):
            exposed = {"y": i, "width": busy - hidden, "height": 0.7, "left": hidden}
            axes.barh(**exposed, **_style(bar.phase))
            axes.barh(**exposed, fill=False, edgecolor=EXPOSED[0], linewidth=1.8)
        text = f"{milliseconds(bar.busy_us)}, {share(bar.hidden_pct)} hidden"
        if bar.bytes and bar.gb_per_s:
            text += f", {bar.bytes / 1e6:.3g} MB, {bar.gb_per_s:.3g} GB/s"
        axes.text(busy + 0.01 * longest, i, text, va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [f"{bar.mode} {bar.phase}" for bar in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, 1.45 * longest)
    axes.set_xlabel(name)
    title = "Overhead: hidden under the model, exposed with a red edge"
    axes.set_title(title, loc="left", fontweight="bold")


def draw_curve(axes: Any, points: list[tuple[float, float]]) -> None:
    """The hit rate over steps."""
    steps, rates = zip(*points, strict=True)
    axes.plot(
        steps, [100 * rate for rate in rates], "o-", color=COLOURS["recall"][0], markersize=3
    )
    axes.set_ylim(0, 100)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.grid(axis="y", alpha=0.4)
    axes.set_title("Hit rate of the recall cache, %", loc="left", fontweight="bold")


def _one(height: float, draw: Any, data: Any) -> Any:
    figure, axes = new_figure([height], _NARROW)
    draw(axes[0], data)
    return figure


def _save(parts: list[tuple[float, Any, Any]], title: str, path: str | Path) -> None:
    figure, axes = new_figure([height for height, _, _ in parts])
    for (_, draw, data), place in zip(parts, axes, strict=True):
        draw(place, data)
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", wrap=True)
    figure.savefig(path, dpi=110)


def new_figure(heights: list[float], width: float = _WIDTH) -> tuple[Any, list[Any]]:
    """A figure without pyplot's global state, and its axes from top to bottom."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("PNG needs matplotlib: pip install 'clusterkv-ops[profile]'") from None
    figure = Figure(figsize=(width, sum(heights) + 0.6), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    for place in axes[:, 0]:
        place.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[:, 0])


def _unit(nanoseconds: float) -> tuple[float, str]:
    """Nanoseconds in the unit that suits such a time, and its name."""
    if nanoseconds >= 1e9:
        return 1e9, "s"
    return (1e6, "ms") if nanoseconds >= 1e6 else (1e3, "us")


def _style(phase: str) -> dict[str, Any]:
    hatch = HATCHES.get(phase)
    colour = COLOURS[phase][0]
    style: dict[str, Any] = {"facecolor": colour, "edgecolor": "#ffffff", "linewidth": 0}
    return {**style, "hatch": hatch} if hatch else style


def _write(axes: Any, x: float, y: float, text: str, phase: str) -> None:
    colour = COLOURS[phase][0]
    box = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color=ink(colour), bbox=box)


def _legend(axes: Any, phases: list[str]) -> None:
    from matplotlib.patches import Patch

    present = [phase for phase in COLOURS if phase in phases]
    patches = [Patch(label=phase, **_style(phase)) for phase in present]
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "frameon": False, "fontsize": 9}
    axes.legend(handles=patches, **place)
