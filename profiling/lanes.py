"""What each stream or thread did."""

from __future__ import annotations

from dataclasses import dataclass

from clusterkv_ops.profiling.accounting import Account, percent
from clusterkv_ops.profiling.intervals import intersect, merge, total
from clusterkv_ops.profiling.phases import MODEL, SHOWN
from clusterkv_ops.profiling.timeline import Timeline


@dataclass(frozen=True)
class LaneRow:
    """One lane in one mode; `phases` holds the busy microseconds of each."""

    mode: str
    lane: str
    role: str
    count: int
    busy_us: float
    busy_pct: float
    phases: dict[str, float]


def lane_rows(accounted: Account, timeline: Timeline) -> list[LaneRow]:
    """One row for each lane that did anything."""
    rows = []
    for index, lane in enumerate(timeline.lanes):
        spans = [span for span in accounted.spans if span.lane == index]
        if not spans:
            continue
        busy = {
            phase: intersect(
                merge((s.start, s.end) for s in spans if s.phase == phase), accounted.windows
            )
            for phase in SHOWN
        }
        time = total(merge(piece for pieces in busy.values() for piece in pieces))
        phases = {phase: total(pieces) / 1e3 for phase, pieces in busy.items() if pieces}
        rows.append(
            LaneRow(
                accounted.mode,
                lane.name,
                _role(phases, index == timeline.main_lane),
                sum(span.is_first for span in spans),
                time / 1e3,
                percent(time, accounted.wall),
                phases,
            )
        )
    return rows


def _role(phases: dict[str, float], is_main: bool) -> str:
    """A word for the lane: "model" for the main one, else what it did most."""
    if is_main:
        return "model"
    if not phases:
        return "idle"
    most = max(phases, key=lambda phase: phases[phase])
    return "model" if most in MODEL else most
