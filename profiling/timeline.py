"""Who did what when: every span of work with its lane, phase, layer and call.

On a GPU trace the lanes are the device's streams, and a span is a kernel, copy or memset; what
enclosed its launch on the CPU tells its phase. On a CPU-only trace the lanes are threads, and a
span is a segment of constant context.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from clusterkv_ops.profiling.calls import Call, device_calls, thread_calls
from clusterkv_ops.profiling.contexts import Context, Segment, segments
from clusterkv_ops.profiling.garbage import no_garbage_collection
from clusterkv_ops.profiling.intervals import Interval, Intervals, merge
from clusterkv_ops.profiling.phases import (
    MODEL,
    PHASES,
    copy_phase,
    is_own_kernel,
    kernel_phase,
    range_rule,
)
from clusterkv_ops.profiling.reader import Progress
from clusterkv_ops.profiling.trace import DeviceEvent, Launch, Thread, Trace
from clusterkv_ops.profiling.trust import unreliable_modes


class Span(NamedTuple):
    """One stretch of work.

    Attributes:
        start, end: nanoseconds.
        phase: one of `phases.PHASES`; of a wait, the phase waited for.
        name: kernel, or the operator or range that decided the phase.
        lane: index into `Timeline.lanes`.
        layer: the attention site it belongs to, where known.
        kind: "kernel", "copy", "memset", "cpu", or "wait" for a thread that only waits.
        bytes: moved by a copy, or reported by the range.
        is_first: False for the later pieces of an interrupted CPU range, so that it counts once.
        launched: when its launch returned, None on a CPU.
    """

    start: int
    end: int
    phase: str
    name: str
    lane: int
    layer: int | None = None
    kind: str = "cpu"
    bytes: int = 0
    is_first: bool = True
    launched: int | None = None


class Lane(NamedTuple):
    """A stream of a device or a thread of a process."""

    name: str
    device: int | None
    stream: int | None


@dataclass
class Timeline:
    """All spans in order of start; `waits` are kept apart, nothing runs during them.

    `unreliable` says of a mode why its phases can't be told apart.
    """

    trace: Trace
    is_device: bool
    lanes: list[Lane] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    unreliable: dict[str, str] = field(default_factory=dict)

    @cached_property
    def busy(self) -> dict[str, Intervals]:
        """When each phase ran."""
        pieces: dict[str, Intervals] = {phase: [] for phase in PHASES}
        for span in self.spans:
            pieces[span.phase].append((span.start, span.end))
        return {phase: merge(intervals) for phase, intervals in pieces.items()}

    def windows(self, mode: str) -> Intervals:
        """When the calls of a mode ran; "all" is every session of the profiler."""
        if mode == "all":
            return self._sessions
        return merge((call.start, call.end) for call in self.calls_of(mode))

    @cached_property
    def _sessions(self) -> Intervals:
        """From the first to the last work of each session; a trace may join several."""
        starts = sorted(self.trace.session_starts)
        extents: dict[int, Interval] = {}
        for span in [*self.spans, *self.waits]:
            session = bisect_right(starts, span.start)
            start, end = extents.get(session, (span.start, span.end))
            extents[session] = (min(start, span.start), max(end, span.end))
        return merge(extents.values())

    def calls_of(self, mode: str) -> list[Call]:
        """The complete calls of a mode; where none is complete, the others."""
        calls = [call for call in self.calls if mode in ("all", call.mode)]
        return [call for call in calls if call.is_complete] or calls

    @property
    def modes(self) -> list[str]:
        """The modes that have calls, and "all"."""
        present = {call.mode for call in self.calls}
        return [m for m in ("prefill", "extend", "decode", "step") if m in present] + ["all"]

    @cached_property
    def main_lane(self) -> int | None:
        """The lane with most model compute."""
        busy: Counter[int] = Counter()
        for span in self.spans:
            if span.phase in MODEL:
                busy[span.lane] += span.end - span.start
        return busy.most_common(1)[0][0] if busy else None


def read_timeline(path: str | Path, progress: Progress | None = None) -> Timeline:
    """Reads a trace file and links it. Raises `TraceError`."""
    return build_timeline(Trace(path, progress))


def build_timeline(trace: Trace) -> Timeline:
    """Links a trace: device work to the ranges around its launch, or threads to their segments."""
    timeline = Timeline(trace, is_device=bool(trace.device_events))
    with no_garbage_collection():
        modes = _call_modes(trace)
        threads = {thread: segments(ranges, modes) for thread, ranges in trace.ranges.items()}
        if timeline.is_device:
            _add_device_spans(timeline, threads)
        else:
            _add_thread_spans(timeline, threads)
        timeline.spans.sort()
    return timeline


def _call_modes(trace: Trace) -> frozenset[str]:
    """Our calls where the trace has any, else the profiler's steps."""
    own = {"prefill", "extend", "decode"}
    names = {item.name for ranges in trace.ranges.values() for item in ranges}
    return frozenset(own if any(range_rule(name).mode in own for name in names) else {"step"})


def _add_thread_spans(timeline: Timeline, threads: dict[Thread, list[Segment]]) -> None:
    for thread in sorted(threads):
        name = timeline.trace.thread_names.get(thread) or f"thread {thread[1]}"
        timeline.lanes.append(Lane(name, None, None))
        seen: set[int] = set()
        for start, end, context in threads[thread]:
            is_first = id(context) not in seen
            seen.add(id(context))
            span = _thread_span(start, end, context, len(timeline.lanes) - 1, is_first)
            (timeline.waits if span.kind == "wait" else timeline.spans).append(span)
    timeline.calls = thread_calls(threads.values())


def _thread_span(start: int, end: int, context: Context, lane: int, is_first: bool) -> Span:
    if context.waits_for is not None:
        name = f"wait for {context.waits_for}"
        return Span(start, end, context.waits_for, name, lane, context.layer, "wait")
    origin = context.origin
    name = origin.name if origin else context.call.name if context.call else "python"
    size = origin.bytes if origin and is_first else 0
    phase = context.phase or "other"
    return Span(start, end, phase, name, lane, context.layer, "cpu", size, is_first)


def _add_device_spans(timeline: Timeline, threads: dict[Thread, list[Segment]]) -> None:
    trace = timeline.trace
    around = _launch_contexts(trace.launches, threads)
    keys = sorted({(event.device, event.stream) for event in trace.device_events})
    lanes = {key: index for index, key in enumerate(keys)}
    timeline.lanes = [Lane(_stream_name(key, keys), *key) for key in keys]
    for event in trace.device_events:
        launch = trace.launches.get(event.correlation)
        context = around.get(event.correlation, Context())
        lane = lanes[event.device, event.stream]
        timeline.spans.append(_device_span(event, launch, context, lane))
    timeline.calls = device_calls(trace, around)
    timeline.unreliable = unreliable_modes(trace, around, timeline.calls)
    _add_range_bytes(timeline, around)


def _device_span(event: DeviceEvent, launch: Launch | None, context: Context, lane: int) -> Span:
    return Span(
        event.start,
        event.end,
        _device_phase(event, launch, context),
        event.name,
        lane,
        context.layer,
        event.kind,
        event.bytes,
        True,
        launch.end if launch else None,
    )


def _device_phase(event: DeviceEvent, launch: Launch | None, context: Context) -> str:
    """Graph annotation, our range, the kernel's name, a replayed copy, the model's operator."""
    if event.phase in PHASES:
        return event.phase
    if context.is_own and context.phase:
        return context.phase
    named = kernel_phase(event.name) if event.kind == "kernel" else None
    if named == "communication" or is_own_kernel(event.name):
        return named or "other"
    is_replay = launch is not None and launch.name.endswith("GraphLaunch")
    if event.kind == "copy" and is_replay:
        return copy_phase(event.name) or "memory"
    if event.kind != "kernel":
        return "memory"
    return context.phase or named or "other"


def _launch_contexts(
    launches: dict[int, Launch], threads: dict[Thread, list[Segment]]
) -> dict[int, Context]:
    """The context in which each launch began, by correlation id."""
    by_thread: dict[Thread, list[tuple[int, int]]] = defaultdict(list)
    for correlation, launch in launches.items():
        by_thread[launch.thread].append((launch.start, correlation))
    around: dict[int, Context] = {}
    for thread, starts in by_thread.items():
        pieces = threads.get(thread, [])
        i = 0
        for start, correlation in sorted(starts):
            while i < len(pieces) and pieces[i].end <= start:
                i += 1
            if i < len(pieces) and pieces[i].start <= start:
                around[correlation] = pieces[i].context
    return around


def _stream_name(key: tuple[int, int], keys: list[tuple[int, int]]) -> str:
    device, stream = key
    has_many = len({device for device, _ in keys}) > 1
    return f"GPU {device} stream {stream}" if has_many else f"stream {stream}"


def _add_range_bytes(timeline: Timeline, around: dict[int, Context]) -> None:
    """Gives the bytes that a range reports to its first kernel, where it made no copy.

    A kernel that gathers rows out of host memory moves bytes without a copy event.
    """
    events = timeline.trace.device_events
    origins = [around.get(event.correlation, Context()).origin for event in events]
    has_copies = {
        id(origin)
        for origin, event in zip(origins, events, strict=True)
        if origin is not None and event.kind == "copy"
    }
    for i, origin in enumerate(origins):
        if origin is not None and origin.bytes and id(origin) not in has_copies:
            timeline.spans[i] = timeline.spans[i]._replace(bytes=origin.bytes)
            has_copies.add(id(origin))
