"""The report: every answer about one trace, as rows that JSON can carry."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clusterkv_ops.profiling.accounting import (
    Account,
    ModeRow,
    PhaseRow,
    account,
    mode_row,
    phase_rows,
)
from clusterkv_ops.profiling.breakdown import LayerRow, StepRow, layer_rows, step_rows
from clusterkv_ops.profiling.cautions import find_cautions
from clusterkv_ops.profiling.contention import ContentionRow, contention_rows
from clusterkv_ops.profiling.copies import CopyRow, copy_rows
from clusterkv_ops.profiling.counters import read_counters
from clusterkv_ops.profiling.garbage import no_garbage_collection
from clusterkv_ops.profiling.headline import headline
from clusterkv_ops.profiling.lanes import LaneRow, lane_rows
from clusterkv_ops.profiling.reader import TraceError
from clusterkv_ops.profiling.timeline import Timeline
from clusterkv_ops.profiling.waits import WaitRow, wait_rows

SCHEMA = "clusterkv.profile/1"

_ROWS: dict[str, type] = {
    "modes": ModeRow,
    "phases": PhaseRow,
    "copies": CopyRow,
    "lanes": LaneRow,
    "waits": WaitRow,
    "steps": StepRow,
    "layers": LayerRow,
    "contention": ContentionRow,
}


@dataclass
class Report:
    """One trace accounted for. `docs/profiling.md` defines every field."""

    trace: dict[str, Any]
    headline: str = ""
    modes: list[ModeRow] = field(default_factory=list)
    phases: list[PhaseRow] = field(default_factory=list)
    copies: list[CopyRow] = field(default_factory=list)
    lanes: list[LaneRow] = field(default_factory=list)
    waits: list[WaitRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    layers: list[LayerRow] = field(default_factory=list)
    contention: list[ContentionRow] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def mode(self, name: str) -> ModeRow | None:
        """The row of a mode, None where the trace has no such call."""
        return next((row for row in self.modes if row.mode == name), None)

    def phase(self, mode: str, phase: str) -> PhaseRow | None:
        """The row of a phase in a mode, None where it did not occur."""
        return next((r for r in self.phases if (r.mode, r.phase) == (mode, phase)), None)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object of schema `clusterkv.profile/1`."""
        return {"schema": SCHEMA, **asdict(self)}


def build_report(timeline: Timeline) -> Report:
    """Asks every analysis. Steps and layers are listed for each mode that has calls."""
    trace = timeline.trace
    report = Report(_describe(timeline), counters=read_counters(trace.metadata, trace.path))
    with no_garbage_collection():
        for mode in timeline.modes:
            accounted = account(timeline, mode)
            _add_mode(report, timeline, accounted)
        report.contention = contention_rows(timeline)
    copies = [row for row in report.copies if row.mode == "all"]
    report.warnings = find_cautions(timeline, accounted, copies, bool(report.counters))
    report.headline = headline(report)
    return report


def _add_mode(report: Report, timeline: Timeline, accounted: Account) -> None:
    mode = accounted.mode
    report.modes.append(mode_row(accounted, timeline))
    report.phases += phase_rows(accounted, mode not in timeline.unreliable)
    report.copies += copy_rows(accounted, timeline)
    report.lanes += lane_rows(accounted, timeline)
    if mode != "all" or len(timeline.modes) == 1:
        report.waits += wait_rows(accounted, timeline)
        report.steps += step_rows(accounted, timeline)
        report.layers += layer_rows(accounted)


def save_report(report: Report, path: str | Path) -> None:
    """Writes the JSON form."""
    Path(path).write_text(json.dumps(report.to_json(), indent=1) + "\n")


def load_report(path: str | Path) -> Report:
    """Reads what `save_report` wrote.

    Raises:
        TraceError: not a report of this schema; the message names the file and the field.
    """
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise TraceError(f"{path}: not JSON: {error}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise TraceError(f"{path}: schema: expected {SCHEMA!r}, got {schema!r}")
    del data["schema"]
    for name, row in _ROWS.items():
        try:
            data[name] = [row(**item) for item in data[name]]
        except (KeyError, TypeError) as error:
            raise TraceError(f"{path}: {name}: expected rows of {row.__name__}: {error}") from None
    try:
        return Report(**data)
    except TypeError as error:
        raise TraceError(f"{path}: expected a report: {error}") from None


def _describe(timeline: Timeline) -> dict[str, Any]:
    properties = timeline.trace.metadata.get("deviceProperties")
    names = [str(p.get("name")) for p in properties or [] if isinstance(p, dict)]
    return {
        "file": timeline.trace.path.name,
        "events": timeline.trace.count,
        "device": names[0] if names else ("GPU" if timeline.is_device else "CPU"),
        "lanes": "streams" if timeline.is_device else "threads",
    }
