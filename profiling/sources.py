"""Finds what the user meant by TRACE or DIR, and reads it."""

from __future__ import annotations

from pathlib import Path

from clusterkv_ops.profiling.reader import TraceError
from clusterkv_ops.profiling.report import Report, build_report, load_report
from clusterkv_ops.profiling.terminal import progress_bar
from clusterkv_ops.profiling.timeline import Timeline, read_timeline

# In the order of preference: the untouched trace, then any trace.
_PATTERNS = (
    "*.kineto.json.gz",
    "*.kineto.json",
    "*.pt.trace.json.gz",
    "*.pt.trace.json",
    "*trace*",
)
PAGE_NAME, REPORT_NAME = "report.html", "report.json"


def find_trace(path: str | Path) -> Path:
    """The file itself, or the newest trace of a folder.

    Raises:
        TraceError: nothing there.
    """
    path = Path(path)
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    if path.is_file():
        return path
    for pattern in _PATTERNS:
        found = sorted(path.glob(pattern), key=lambda file: (file.stat().st_mtime, file.name))
        if found:
            return found[-1]
    raise TraceError(f"{path}: contains no trace (looked for {', '.join(_PATTERNS)})")


def open_timeline(path: str | Path) -> Timeline:
    """Reads the trace of a file or folder, with a progress bar."""
    trace = find_trace(path)
    with progress_bar(f"reading {trace.name}") as progress:
        return read_timeline(trace, progress)


def open_report(path: str | Path) -> Report:
    """The report of a trace or folder; a saved report is loaded instead of made again."""
    path = Path(path)
    if path.is_dir() and (path / REPORT_NAME).exists():
        return load_report(path / REPORT_NAME)
    if path.name.endswith("report.json"):
        return load_report(path)
    return build_report(open_timeline(path))
