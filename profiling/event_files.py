"""Writes everything about a run into its folder, which TensorBoard can serve.

RUN/report.html               the page, which the ClusterKV tab shows
RUN/report.json               the report, which the tab compares
RUN/NAME.pt.trace.json.gz     the trace for torch-tb-profiler
RUN/events.out.tfevents...    scalars, their layout, a Markdown table, figures
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from clusterkv_ops.profiling.compat import compat_name, write_compat
from clusterkv_ops.profiling.markdown import to_markdown
from clusterkv_ops.profiling.page import render_page
from clusterkv_ops.profiling.report import Report, save_report
from clusterkv_ops.profiling.scalars import LAYOUT, scalars
from clusterkv_ops.profiling.sources import PAGE_NAME, REPORT_NAME
from clusterkv_ops.profiling.terminal import progress_bar
from clusterkv_ops.profiling.timeline import Timeline


def can_write_events() -> bool:
    """Whether TensorBoard and matplotlib are installed."""
    return all(importlib.util.find_spec(name) for name in ("tensorboard", "matplotlib"))


def write_run(report: Report, timeline: Timeline, folder: Path) -> list[Path]:
    """All files of one run; the event file only where it can be written. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = timeline.trace.path
    copy, page, saved = (folder / name for name in (compat_name(trace), PAGE_NAME, REPORT_NAME))
    with progress_bar(f"writing {copy.name}") as progress:
        write_compat(trace, copy, progress)
    page.write_text(render_page(report, timeline))
    save_report(report, saved)
    events = write_events(report, timeline, folder) if can_write_events() else []
    return [page, saved, copy, *events]


def write_events(report: Report, timeline: Timeline | None, folder: Path) -> list[Path]:
    """The event file alone.

    Raises:
        ImportError: torch, tensorboard or matplotlib is missing.
    """
    from torch.utils.tensorboard import SummaryWriter

    from clusterkv_ops.profiling.png import report_figures

    before = set(folder.glob("events.out.tfevents.*"))
    writer = SummaryWriter(str(folder))
    writer.add_custom_scalars(LAYOUT)
    for point in scalars(report):
        writer.add_scalar(point.tag, point.value, point.step)
    writer.add_text("clusterkv/report", to_markdown(report), 0)
    for name, figure in report_figures(report, timeline).items():
        writer.add_figure(f"clusterkv/{name}", figure, 0)
    writer.close()
    return sorted(set(folder.glob("events.out.tfevents.*")) - before)
