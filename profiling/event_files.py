"""Writes a report into a TensorBoard log directory: curves, table, figures, page and trace.

LOGDIR/RUN/events.out.tfevents...     scalars, layout, Markdown table, figures
LOGDIR/RUN/NAME.clusterkv.html        the page that the ClusterKV tab shows
LOGDIR/RUN/NAME.clusterkv.json        the report that the tab compares
LOGDIR/RUN/NAME.pt.trace.json.gz      the trace for torch-tb-profiler
"""

from __future__ import annotations

from pathlib import Path

from clusterkv_ops.profiling.compat import compat_name, write_compat
from clusterkv_ops.profiling.markdown import to_markdown
from clusterkv_ops.profiling.page import render_page
from clusterkv_ops.profiling.report import Report, save_report
from clusterkv_ops.profiling.scalars import LAYOUT, scalars
from clusterkv_ops.profiling.terminal import progress_bar
from clusterkv_ops.profiling.timeline import Timeline

PAGE_SUFFIX = ".clusterkv.html"
REPORT_SUFFIX = ".clusterkv.json"


def write_run(report: Report, timeline: Timeline, folder: Path) -> list[Path]:
    """Everything about one run into `folder`; returns the files it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = timeline.trace.path
    copy = folder / compat_name(trace)
    name = copy.name.removesuffix(".pt.trace.json.gz")
    with progress_bar(f"writing {copy.name}") as progress:
        write_compat(trace, copy, progress)
    page, saved = folder / f"{name}{PAGE_SUFFIX}", folder / f"{name}{REPORT_SUFFIX}"
    page.write_text(render_page(report, timeline))
    save_report(report, saved)
    return [copy, page, saved, *write_events(report, timeline, folder)]


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
