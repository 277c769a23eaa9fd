"""Accounts every instant of a mode's wall time to one phase, or to idle.

With W the windows of the mode's calls, P the union of a phase inside W and M the union of the
model's own phases inside W:

    busy(P)    = |P|
    hidden(P)  = |P n M| / |P|                    of overhead phases
    exposed(P) = the part of P that no phase before it in `SWEEP` covers

The sweep takes the model first, so what is left to an overhead phase is outside M, and
sum of exposed over all phases + idle = |W|, exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from clusterkv_ops.profiling.intervals import Intervals, clip, intersect, merge, subtract, total
from clusterkv_ops.profiling.phases import MODEL, OVERHEAD, SHOWN
from clusterkv_ops.profiling.timeline import Span, Timeline

SWEEP = MODEL + OVERHEAD


@dataclass(frozen=True)
class ModeRow:
    """One mode: model_us + the overhead phases' exposed_us + idle_us = wall_us.

    Where `unreliable` holds a reason, no share can be trusted, and all of them are None.
    """

    mode: str
    calls: int
    wall_us: float
    model_us: float
    model_pct: float | None
    idle_us: float
    idle_pct: float | None
    unreliable: str | None


@dataclass(frozen=True)
class PhaseRow:
    """One phase of a mode. Shares are of the mode's wall; `hidden_pct` is of the phase itself, and
    None for the model's own phases. All shares are None where the mode is unreliable."""

    mode: str
    phase: str
    count: int
    busy_us: float
    busy_pct: float | None
    hidden_pct: float | None
    exposed_us: float
    exposed_pct: float | None
    bytes: int
    gb_per_s: float | None


@dataclass(frozen=True)
class Account:
    """A mode's windows, and its phases inside them: when busy, and the instants given to them."""

    mode: str
    windows: Intervals
    busy: dict[str, Intervals]
    exposed: dict[str, Intervals]
    idle: Intervals
    spans: list[Span]

    @property
    def wall(self) -> int:
        """Nanoseconds of the windows."""
        return total(self.windows)

    @cached_property
    def model(self) -> Intervals:
        """When the model itself computed."""
        return merge(piece for phase in MODEL for piece in self.busy[phase])


def account(timeline: Timeline, mode: str) -> Account:
    """Gives every instant of the mode's windows away."""
    windows = timeline.windows(mode)
    busy = {phase: intersect(timeline.busy[phase], windows) for phase in SWEEP}
    exposed, idle = sweep(busy, windows)
    return Account(mode, windows, busy, exposed, idle, started_inside(timeline.spans, windows))


def sweep(
    busy: dict[str, Intervals], windows: Intervals
) -> tuple[dict[str, Intervals], Intervals]:
    """Splits the windows among the phases in the order of `SWEEP`; the rest is idle."""
    free = windows
    exposed: dict[str, Intervals] = {}
    for phase in SWEEP:
        exposed[phase] = intersect(busy[phase], free)
        free = subtract(free, exposed[phase])
    return exposed, free


def started_inside(spans: list[Span], windows: Intervals) -> list[Span]:
    """The spans that start in any window; both lists are in order of time."""
    inside: list[Span] = []
    for start, end in windows:
        first = bisect_left(spans, start, key=itemgetter(0))
        last = bisect_left(spans, end, key=itemgetter(0))
        inside += spans[first:last]
    return inside


def mode_row(accounted: Account, timeline: Timeline) -> ModeRow:
    """The mode as a whole."""
    wall, model, idle = accounted.wall, total(accounted.model), total(accounted.idle)
    unreliable = timeline.unreliable.get(accounted.mode)
    return ModeRow(
        accounted.mode,
        len(timeline.calls_of(accounted.mode)),
        wall / 1e3,
        model / 1e3,
        None if unreliable else percent(model, wall),
        idle / 1e3,
        None if unreliable else percent(idle, wall),
        unreliable,
    )


def phase_rows(accounted: Account, is_reliable: bool = True) -> list[PhaseRow]:
    """One row for each phase that occurs."""
    by_phase: dict[str, list[Span]] = defaultdict(list)
    for span in accounted.spans:
        by_phase[span.phase].append(span)
    return [
        _phase_row(accounted, phase, by_phase[phase], is_reliable)
        for phase in SHOWN
        if accounted.busy[phase] or by_phase[phase]
    ]


def _phase_row(accounted: Account, phase: str, spans: list[Span], is_reliable: bool) -> PhaseRow:
    busy, exposed = accounted.busy[phase], accounted.exposed[phase]
    hidden = intersect(busy, accounted.model)
    moved = sum(span.bytes for span in spans)

    def share(part: Intervals, whole: int) -> float | None:
        return percent(total(part), whole) if is_reliable else None

    return PhaseRow(
        accounted.mode,
        phase,
        sum(span.is_first for span in spans),
        total(busy) / 1e3,
        share(busy, accounted.wall),
        share(hidden, total(busy)) if phase in OVERHEAD else None,
        total(exposed) / 1e3,
        share(exposed, accounted.wall),
        moved,
        moved / total(busy) if moved and busy else None,
    )


def exposed_between(accounted: Account, start: int, end: int) -> dict[str, int]:
    """Nanoseconds of [start, end) given to each phase, and to "idle"."""
    shares = {phase: total(clip(accounted.exposed[phase], start, end)) for phase in SHOWN}
    shares["idle"] = total(clip(accounted.idle, start, end))
    return shares


def percent(part: float, whole: float) -> float:
    """100 * part / whole, and 0 of nothing."""
    return 100 * part / whole if whole else 0.0
