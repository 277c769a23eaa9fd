"""From finished profilers to one trace file, with the run's counters in its metadata."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import profile

from clusterkv_ops.profiling.counters import KEY, SCHEMA

_GAP_US = 100.0


def save_trace(profiles: Sequence[profile], path: Path, counters: Mapping[str, Any]) -> None:
    """Write what the profilers saw, in the order of their runs, as one gzipped trace.

    A run is profiled in parts, so that compilation between the parts stays out of the trace. The
    events are Kineto's own; a later part is moved in time to where the part before it ends.
    """
    parts = [_exported(part) for part in profiles]
    trace = parts[0]
    trace[KEY] = {"schema": SCHEMA, **counters}
    for part in parts[1:]:
        _, end = _bounds(trace)
        start, _ = _bounds(part)
        for event in part["traceEvents"]:
            if "ts" in event:
                event["ts"] += end + _GAP_US - start
        trace["traceEvents"] += part["traceEvents"]
    with gzip.open(path, "wt") as stream:
        json.dump(trace, stream)


def operator_seconds(part: profile, name: str) -> float:
    """Seconds inside an operator, over all threads."""
    return sum(row.cpu_time_total for row in part.key_averages() if row.key == name) / 1e6


def _exported(part: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        part.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text())
        return trace


def _bounds(trace: Mapping[str, Any]) -> tuple[float, float]:
    """Begin and end of a trace's spans, in its own microseconds."""
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    start = min(event["ts"] for event in spans)
    return start, max(event["ts"] + event.get("dur", 0) for event in spans)
