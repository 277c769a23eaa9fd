"""What a reader of the report should know before trusting its numbers."""

from __future__ import annotations

from clusterkv_ops.profiling.accounting import Account
from clusterkv_ops.profiling.copies import CopyRow
from clusterkv_ops.profiling.intervals import subtract, total
from clusterkv_ops.profiling.phases import OVERHEAD
from clusterkv_ops.profiling.timeline import Timeline


def find_cautions(
    timeline: Timeline, whole: Account, copies: list[CopyRow], has_counters: bool
) -> list[str]:
    """Sentences, the gravest first. `whole` is the account of mode "all"."""
    return [
        *_unreliable(timeline),
        *_lost_calls(timeline),
        *_no_work(timeline),
        *_outside_calls(timeline, whole),
        *_pageable(copies),
        *_devices(timeline),
        *_odd_durations(timeline),
        *_no_counters(has_counters, whole),
    ]


def _unreliable(timeline: Timeline) -> list[str]:
    return [f"{mode}: unreliable: {reason}" for mode, reason in timeline.unreliable.items()]


def _lost_calls(timeline: Timeline) -> list[str]:
    lost = [f"{call.mode} {call.number}" for call in timeline.calls if not call.is_complete]
    if not lost:
        return []
    names = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
    return [f"{len(lost)} call(s) launched kernels that the trace does not show: {names}"]


def _no_work(timeline: Timeline) -> list[str]:
    if not timeline.spans:
        return ["the trace contains neither device events nor CPU operators"]
    if not timeline.calls:
        return ["no clusterkv.prefill, clusterkv.decode or ProfilerStep range: only mode all"]
    return []


def _outside_calls(timeline: Timeline, whole: Account) -> list[str]:
    """Our work that no call's window holds is in no mode but "all"."""
    windows = [
        window for mode in timeline.modes if mode != "all" for window in timeline.windows(mode)
    ]
    if not windows:
        return []
    found = []
    for phase in OVERHEAD[:4]:
        outside = total(subtract(whole.busy[phase], sorted(windows)))
        if outside > total(whole.busy[phase]) / 1000:
            found.append(f"{outside / 1e3:,.1f} us of {phase} ran outside of every call")
    return found


def _pageable(copies: list[CopyRow]) -> list[str]:
    return [
        f"{row.count} pageable copies, {row.kind}, {row.bytes / 1e6:,.2f} MB: memory that is not "
        "pinned can't be copied beside compute"
        for row in copies
        if row.is_pageable
    ]


def _devices(timeline: Timeline) -> list[str]:
    devices = sorted({lane.device for lane in timeline.lanes if lane.device is not None})
    if len(devices) < 2:
        return []
    return [f"devices {', '.join(map(str, devices))} are accounted as if they were one"]


def _odd_durations(timeline: Timeline) -> list[str]:
    count = timeline.trace.negative_durations
    return [f"{count} event(s) of negative duration were taken as 0"] if count else []


def _no_counters(has_counters: bool, whole: Account) -> list[str]:
    if has_counters or not whole.busy["selection"]:
        return []
    return ["the trace carries no counters: no hit rate, and bytes only of copies"]
