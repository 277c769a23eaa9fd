"""The windows of time that belong to a prefill, an extend or a decode step.

On a CPU a call is its range. On a device it reaches from the first to the last event that it
launched, but ends where the next call begins: what runs beside the next call is accounted there,
where it can be hidden or exposed.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from clusterkv_ops.profiling.contexts import Context, Segment
from clusterkv_ops.profiling.phases import range_rule
from clusterkv_ops.profiling.trace import Range, Trace

_KERNEL_LAUNCH = re.compile(r"^(cuda|cu|hip)\w*(LaunchKernel|LaunchCooperative|GraphLaunch)")
_STEP = re.compile(r"ProfilerStep#(\d+)")


class Call(NamedTuple):
    """One call of the model.

    Attributes:
        mode: "prefill", "extend", "decode", or "step" of a foreign trace.
        number: counts the calls of its mode from 0; the profiler's own number of a foreign step.
        start, end: nanoseconds.
        is_complete: False where kernels that it launched are missing from the trace.
    """

    mode: str
    number: int
    start: int
    end: int
    is_complete: bool = True


def thread_calls(threads: Iterable[Iterable[Segment]]) -> list[Call]:
    """The calls of a CPU-only trace."""
    found = {
        id(segment.context.call): segment.context.call
        for pieces in threads
        for segment in pieces
        if segment.context.call is not None
    }
    windows = [(item, item.start, item.end, True) for item in found.values()]
    return _numbered(windows)


def device_calls(trace: Trace, around: dict[int, Context]) -> list[Call]:
    """The calls of a GPU trace. `around` gives the context of each launch by correlation id."""
    spans: dict[int, tuple[int, int]] = {}
    seen: set[int] = set()
    calls: dict[int, Range] = {}
    for event in trace.device_events:
        seen.add(event.correlation)
        call = around.get(event.correlation, Context()).call
        if call is not None:
            start, end = spans.get(id(call), (event.start, event.end))
            spans[id(call)] = (min(start, event.start), max(end, event.end))
    is_complete: dict[int, bool] = {}
    for correlation, context in around.items():
        if context.call is not None:
            key = id(context.call)
            calls[key] = context.call
            is_lost = correlation not in seen and _is_kernel_launch(trace, correlation)
            is_complete[key] = is_complete.get(key, True) and not is_lost
    return _numbered(
        [
            (item, *spans.get(key, (item.start, item.start)), is_complete[key] and key in spans)
            for key, item in calls.items()
        ]
    )


def _is_kernel_launch(trace: Trace, correlation: int) -> bool:
    return bool(_KERNEL_LAUNCH.match(trace.launches[correlation].name))


def _numbered(windows: list[tuple[Range, int, int, bool]]) -> list[Call]:
    """Calls in the order in which they were made, each cut where the next window begins."""
    starts = sorted(start for _, start, end, _ in windows if end > start)
    counts: Counter[str] = Counter()
    calls: list[Call] = []
    for item, start, end, is_complete in sorted(windows, key=lambda window: window[0].start):
        later = bisect_right(starts, start)
        if later < len(starts):
            end = min(end, starts[later])
        mode = range_rule(item.name).mode or "step"
        step = _STEP.match(item.name)
        calls.append(Call(mode, int(step[1]) if step else counts[mode], start, end, is_complete))
        counts[mode] += 1
    return calls
