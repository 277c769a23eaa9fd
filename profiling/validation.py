"""Whether a trace can be trusted: what it contains, and what in it contradicts itself."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from clusterkv_ops.profiling.counters import read_counters
from clusterkv_ops.profiling.report import build_report
from clusterkv_ops.profiling.timeline import Timeline


class Finding(NamedTuple):
    """One line: level is "ok", "warning" or "error"."""

    level: str
    text: str


def validate(timeline: Timeline) -> list[Finding]:
    """All findings. An error means that the report's numbers would be wrong."""
    trace = timeline.trace
    found = [Finding("ok", f"{trace.count:,} events read, {len(timeline.spans):,} spans of work")]
    found += _links(timeline)
    found += _causality(timeline)
    found += _overlaps(timeline)
    found += _calls(timeline)
    counters = read_counters(trace.metadata, trace.path)
    found.append(
        Finding("ok", f"counters: {', '.join(sorted(counters))}")
        if counters
        else Finding("warning", "no counters (metadata key clusterkv)")
    )
    found += [Finding("warning", text) for text in build_report(timeline).warnings]
    return found


def _links(timeline: Timeline) -> list[Finding]:
    events = timeline.trace.device_events
    if not events:
        return [Finding("ok", f"no device events: lanes are {len(timeline.lanes)} threads")]
    lost = sum(event.correlation not in timeline.trace.launches for event in events)
    text = f"{len(events) - lost:,} of {len(events):,} device events have their launch"
    return [Finding("warning" if lost > len(events) / 10 else "ok", text)]


def _causality(timeline: Timeline) -> list[Finding]:
    """Nothing starts on the device before its launch began."""
    early = 0
    for event in timeline.trace.device_events:
        launch = timeline.trace.launches.get(event.correlation)
        early += launch is not None and event.start < launch.start
    if early:
        return [Finding("error", f"{early:,} device events start before their launch")]
    return (
        [Finding("ok", "every device event starts after its launch")] if timeline.is_device else []
    )


def _overlaps(timeline: Timeline) -> list[Finding]:
    """Work of one stream that overlaps: intended (programmatic dependent launch), or clocks."""
    ends: dict[int, int] = defaultdict(int)
    count = 0
    for span in timeline.spans:
        count += span.start < ends[span.lane]
        ends[span.lane] = max(ends[span.lane], span.end)
    if count:
        return [Finding("ok", f"{count:,} spans start before their predecessor on the lane ends")]
    return []


def _calls(timeline: Timeline) -> list[Finding]:
    if not timeline.calls:
        return []
    modes = [f"{len(timeline.calls_of(m))} {m}" for m in timeline.modes if m != "all"]
    return [Finding("ok", f"calls: {', '.join(modes)}")]
