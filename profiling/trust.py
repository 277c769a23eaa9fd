"""Which modes of a trace can't be split into phases, and why. Their shares are not printed."""

from __future__ import annotations

from collections import defaultdict

from clusterkv_ops.profiling.calls import Call
from clusterkv_ops.profiling.contexts import Context
from clusterkv_ops.profiling.phases import is_own_kernel, range_rule
from clusterkv_ops.profiling.trace import DeviceEvent, Trace

_NO_EVENTS = "a CUDA graph was replayed and none of its kernels is in the trace"
_NO_NAMES = "a CUDA graph was replayed and none of its kernels carries a name of this package"
_INCOMPLETE = "every call has kernels that are missing from the trace"


def unreliable_modes(
    trace: Trace, around: dict[int, Context], calls: list[Call]
) -> dict[str, str]:
    """A reason for each mode that can't be trusted; whatever hits one mode hits "all"."""
    reasons: dict[str, str] = {}
    events = _events_of_graphs(trace)
    for correlation, nodes in events.items():
        reason = _graph_reason(nodes)
        if reason:
            call = around.get(correlation, Context()).call
            mode = range_rule(call.name).mode if call else None
            reasons[mode or "all"] = reason
    for mode in {call.mode for call in calls}:
        if not any(call.is_complete for call in calls if call.mode == mode):
            reasons.setdefault(mode, _INCOMPLETE)
    if reasons:
        reasons.setdefault("all", next(iter(reasons.values())))
    return reasons


def _events_of_graphs(trace: Trace) -> dict[int, list[DeviceEvent]]:
    """The device events of each graph launch, by correlation id."""
    replays = {c for c, launch in trace.launches.items() if launch.name.endswith("GraphLaunch")}
    events: dict[int, list[DeviceEvent]] = defaultdict(list, {c: [] for c in replays})
    for event in trace.device_events:
        if event.correlation in replays:
            events[event.correlation].append(event)
    return events


def _graph_reason(nodes: list[DeviceEvent]) -> str | None:
    if not nodes:
        return _NO_EVENTS
    is_named = any(node.phase or is_own_kernel(node.name) for node in nodes)
    return None if is_named else _NO_NAMES
