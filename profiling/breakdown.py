"""The same accounting cut finer: one row a step, one row a layer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from clusterkv_ops.profiling.accounting import Account, exposed_between, percent
from clusterkv_ops.profiling.intervals import Intervals, clip, intersect, merge, total
from clusterkv_ops.profiling.phases import OVERHEAD, SHOWN
from clusterkv_ops.profiling.timeline import Timeline


@dataclass(frozen=True)
class StepRow:
    """One call of the model: the exposed time of its phases and idle add up to its wall.

    `hidden_pct` holds the overhead phases that ran in the call.
    """

    mode: str
    step: int
    start_us: float
    wall_us: float
    idle_us: float
    exposed_us: dict[str, float]
    hidden_pct: dict[str, float]


@dataclass(frozen=True)
class LayerRow:
    """One phase in one layer, over all calls of a mode."""

    mode: str
    layer: int
    phase: str
    count: int
    busy_us: float
    exposed_us: float


def step_rows(accounted: Account, timeline: Timeline) -> list[StepRow]:
    """One row for each call of the account's mode ("all": of every mode)."""
    origin = min((call.start for call in timeline.calls), default=0)
    rows = []
    for call in timeline.calls_of(accounted.mode):
        shares = exposed_between(accounted, call.start, call.end)
        idle = shares.pop("idle")
        exposed = {phase: share / 1e3 for phase, share in shares.items() if share}
        wall = call.end - call.start
        start = (call.start - origin) / 1e3
        hidden = _hidden_between(accounted, call.start, call.end)
        rows.append(
            StepRow(call.mode, call.number, start, wall / 1e3, idle / 1e3, exposed, hidden)
        )
    return rows


def _hidden_between(accounted: Account, start: int, end: int) -> dict[str, float]:
    model = clip(accounted.model, start, end)
    busy = {phase: clip(accounted.busy[phase], start, end) for phase in OVERHEAD}
    return {
        phase: percent(total(intersect(pieces, model)), total(pieces))
        for phase, pieces in busy.items()
        if pieces
    }


def layer_rows(accounted: Account) -> list[LayerRow]:
    """One row for each layer and phase. An exposed instant goes to the span that began first."""
    pieces: dict[tuple[int, str], Intervals] = defaultdict(list)
    counts: dict[tuple[int, str], int] = defaultdict(int)
    exposed: dict[tuple[int, str], int] = defaultdict(int)
    takers = {phase: _Taker(accounted.exposed[phase]) for phase in SHOWN}
    for span in accounted.spans:
        taken = takers[span.phase].take(span.start, span.end)
        if span.layer is not None:
            key = span.layer, span.phase
            pieces[key].append((span.start, span.end))
            counts[key] += span.is_first
            exposed[key] += taken
    rows = []
    for key in sorted(pieces, key=lambda key: (key[0], SHOWN.index(key[1]))):
        busy = total(intersect(merge(pieces[key]), accounted.windows))
        rows.append(LayerRow(accounted.mode, *key, counts[key], busy / 1e3, exposed[key] / 1e3))
    return rows


class _Taker:
    """Gives the instants of a list away, each once, to spans that come in order of start."""

    def __init__(self, intervals: Intervals) -> None:
        self._intervals = intervals
        self._first = 0
        self._given_until = 0

    def take(self, start: int, end: int) -> int:
        """Nanoseconds of [start, end) that nobody took before."""
        start = max(start, self._given_until)
        self._given_until = max(start, end)
        intervals, first = self._intervals, self._first
        while first < len(intervals) and intervals[first][1] <= start:
            first += 1
        self._first = first
        taken = 0
        while first < len(intervals) and intervals[first][0] < end:
            taken += min(intervals[first][1], end) - max(intervals[first][0], start)
            first += 1
        return max(taken, 0)
