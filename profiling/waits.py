"""What the main lane waited for while nothing ran on it.

A gap of a stream is first the host's: until the next kernel was launched. The rest is given to the
lane that the trace names (a stream wait event), else to the work that ended last before the gap
did. On a CPU the runtime marks its waits itself, with ranges called `clusterkv.wait.<phase>`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

from clusterkv_ops.profiling.accounting import Account, percent
from clusterkv_ops.profiling.intervals import Intervals, intersect, merge, total
from clusterkv_ops.profiling.timeline import Span, Timeline
from clusterkv_ops.profiling.trace import StreamWait


@dataclass(frozen=True)
class WaitRow:
    """Time the main lane stood still for one cause: a phase, "host" or "unknown"."""

    mode: str
    waits_for: str
    count: int
    wait_us: float
    wait_pct: float


def wait_rows(accounted: Account, timeline: Timeline) -> list[WaitRow]:
    """One row for each cause, the longest first."""
    waits = _stream_waits(timeline) if timeline.is_device else _marked_waits(timeline)
    by_cause: dict[str, Intervals] = defaultdict(list)
    for cause, start, end in waits:
        by_cause[cause].append((start, end))
    rows = []
    for cause, pieces in by_cause.items():
        inside = intersect(merge(pieces), accounted.windows)
        time = total(inside)
        if time:
            share = percent(time, accounted.wall)
            rows.append(WaitRow(accounted.mode, cause, len(inside), time / 1e3, share))
    return sorted(rows, key=lambda row: -row.wait_us)


def _marked_waits(timeline: Timeline) -> list[tuple[str, int, int]]:
    return [(span.phase, span.start, span.end) for span in timeline.waits]


def _stream_waits(timeline: Timeline) -> list[tuple[str, int, int]]:
    main = timeline.main_lane
    if main is None:
        return []
    ours = [span for span in timeline.spans if span.lane == main]
    others = sorted((s for s in timeline.spans if s.lane != main), key=lambda span: span.end)
    named = _named_waits(timeline, main)
    waits: list[tuple[str, int, int]] = []
    until = ours[0].end
    for span in ours[1:]:
        if span.start > until:
            launched = min(max(until, span.launched or until), span.start)
            waits.append(("host", until, launched))
            if span.start > launched:
                stream = _named_stream(named, until, span)
                waits.append(
                    (_cause(others, stream, timeline, launched, span), launched, span.start)
                )
        until = max(until, span.end)
    return waits


def _cause(
    others: list[Span], stream: int | None, timeline: Timeline, start: int, span: Span
) -> str:
    """The phase of the other lanes' work that ended last in (start, span.start]."""
    first = bisect_right(others, start, key=lambda other: other.end)
    last = bisect_right(others, span.start, key=lambda other: other.end)
    for other in reversed(others[first:last]):
        if stream is None or timeline.lanes[other.lane].stream == stream:
            return other.phase
    return "unknown"


def _named_waits(timeline: Timeline, main: int) -> list[StreamWait]:
    lane = timeline.lanes[main]
    waits = timeline.trace.stream_waits
    return sorted(w for w in waits if (w.device, w.stream) == (lane.device, lane.stream))


def _named_stream(named: list[StreamWait], start: int, span: Span) -> int | None:
    """The stream of the last wait event that was set before the span's launch, in this gap."""
    limit = span.launched or span.start
    last = bisect_left(named, limit, key=lambda wait: wait.time) - 1
    return named[last].waits_on if last >= 0 and named[last].time >= start else None
