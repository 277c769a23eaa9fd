"""What the pictures show, computed once for the SVG of the report and the PNG of matplotlib.

No drawing here: positions are nanoseconds or shares, colours are phases.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

from clusterkv_ops.profiling.calls import Call
from clusterkv_ops.profiling.intervals import Intervals, clip, merge, subtract
from clusterkv_ops.profiling.phases import MODEL, OVERHEAD, SHOWN
from clusterkv_ops.profiling.report import Report
from clusterkv_ops.profiling.timeline import Span, Timeline

# A box narrower than this share of the picture is drawn together with its neighbours.
_FINEST = 1 / 2000


@dataclass(frozen=True)
class Box:
    """Work of one lane; `count` spans that are too close to tell apart."""

    start: int
    end: int
    phase: str
    name: str
    count: int
    bytes: int
    layer: int | None


class Row(NamedTuple):
    """One lane of a picture."""

    role: str
    name: str
    boxes: list[Box]


@dataclass(frozen=True)
class LanePicture:
    """A stretch of time, lane by lane. In `exposed` overhead runs and no model compute does."""

    title: str
    start: int
    end: int
    rows: list[Row]
    exposed: Intervals


class Share(NamedTuple):
    """One piece of a bar that is 100 % of a mode's wall."""

    phase: str
    percent: float
    microseconds: float


class Bar(NamedTuple):
    """An overhead phase: how much of it was hidden, how much it moved."""

    mode: str
    phase: str
    busy_us: float
    hidden_pct: float | None
    bytes: int
    gb_per_s: float | None


def lane_pictures(timeline: Timeline) -> list[LanePicture]:
    """The first call of each mode that happens once, and the median one of those that repeat."""
    pictures = []
    for mode in timeline.modes:
        calls = timeline.calls_of(mode)
        if mode == "all":
            if len(timeline.modes) == 1 and timeline.spans:
                start, end = timeline.windows("all")[0]
                pictures.append(lane_picture(timeline, start, end, "The whole trace"))
        elif calls:
            call = _median(calls)
            pictures.append(lane_picture(timeline, call.start, call.end, _title(call, len(calls))))
    return pictures


def lane_picture(timeline: Timeline, start: int, end: int, title: str) -> LanePicture:
    """All lanes that work between two instants."""
    lanes: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.start < end and span.end > start:
            lanes[span.lane].append(span)
    finest = int((end - start) * _FINEST)
    overhead = merge(piece for phase in OVERHEAD for piece in timeline.busy[phase])
    model = merge(piece for phase in MODEL for piece in timeline.busy[phase])
    exposed = subtract(clip(overhead, start, end), clip(model, start, end))
    order = sorted(lanes, key=lambda lane: (lane != timeline.main_lane, lane))
    rows = [
        Row(
            _role(timeline, lane, lanes[lane]),
            timeline.lanes[lane].name,
            _boxes(lanes[lane], start, end, finest),
        )
        for lane in order
    ]
    return LanePicture(title, start, end, rows, exposed)


def shares(report: Report, mode: str) -> list[Share]:
    """The mode's wall, split among the phases and idle; empty where it is unreliable."""
    row = report.mode(mode)
    if row is None or row.idle_pct is None:
        return []
    pieces = {p.phase: p for p in report.phases if p.mode == mode}
    found = [
        Share(phase, pieces[phase].exposed_pct or 0.0, pieces[phase].exposed_us)
        for phase in (*MODEL, *[p for p in SHOWN if p in OVERHEAD])
        if phase in pieces and pieces[phase].exposed_us
    ]
    if row.idle_us:
        found.append(Share("idle", row.idle_pct, row.idle_us))
    return found


def bars(report: Report) -> list[Bar]:
    """The overhead phases of every mode."""
    modes = [row.mode for row in report.modes if row.mode != "all" or len(report.modes) == 1]
    return [
        Bar(row.mode, row.phase, row.busy_us, row.hidden_pct, row.bytes, row.gb_per_s)
        for row in report.phases
        if row.mode in modes and row.phase in OVERHEAD and row.busy_us
    ]


def is_exposed(bar: Bar) -> bool:
    """Whether enough of a bar is exposed to be drawn; less is rounding of timestamps."""
    return bar.hidden_pct is not None and bar.hidden_pct < 99.95


def hit_rates(report: Report) -> list[tuple[float, float]]:
    """(step, hit rate 0..1) of every step that recalled anything."""
    steps = report.counters.get("steps", [])
    return [
        (float(step.get("step", i)), step["hit_rate"])
        for i, step in enumerate(steps)
        if step.get("hit_rate") is not None
    ]


def _role(timeline: Timeline, lane: int, spans: list[Span]) -> str:
    """What the lane does here: a copy lane offloads in prefill and recalls in decode."""
    if lane == timeline.main_lane:
        return "model"
    time: Counter[str] = Counter()
    for span in spans:
        time[span.phase] += span.end - span.start
    return time.most_common(1)[0][0]


def _boxes(spans: list[Span], start: int, end: int, finest: int) -> list[Box]:
    """The spans as boxes inside the window; neighbours of one phase join when both are tiny."""
    boxes: list[Box] = []
    for span in sorted(spans):
        left, right = max(span.start, start), min(span.end, end)
        last = boxes[-1] if boxes else None
        is_near = last is not None and left - last.end < finest and last.phase == span.phase
        if last is not None and is_near and right - last.start < 4 * finest:
            joined = replace(
                last, end=max(last.end, right), count=last.count + 1, bytes=last.bytes + span.bytes
            )
            boxes[-1] = joined
        else:
            boxes.append(Box(left, right, span.phase, span.name, 1, span.bytes, span.layer))
    return boxes


def _median(calls: list[Call]) -> Call:
    return sorted(calls, key=lambda call: call.end - call.start)[len(calls) // 2]


def _title(call: Call, count: int) -> str:
    name = {"prefill": "Prefill", "extend": "Extend", "decode": "Decode step", "step": "Step"}
    which = f" {call.number} (the median of {count})" if count > 1 else ""
    return f"{name[call.mode]}{which}"
