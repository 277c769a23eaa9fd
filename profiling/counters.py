"""The operators' own counters, which a recorded run carries in its trace as `clusterkv`.

Hit rate, bytes asked for and bytes moved can't be seen in a timeline; docs/profiling.md lists the
fields. Unknown ones are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterkv_ops.profiling.reader import TraceError

KEY = "clusterkv"
SCHEMA = "clusterkv.counters/1"

_STEP_FIELDS = ("step", "hits", "misses", "bytes_asked", "bytes_moved")


def read_counters(metadata: Mapping[str, Any], path: object) -> dict[str, Any]:
    """The counters of a trace, with `hit_rate` added; empty where it has none.

    Raises:
        TraceError: a counter has the wrong type; the message names file and field.
    """
    counters = metadata.get(KEY, {})
    if not isinstance(counters, dict):
        raise TraceError(f"{path}: {KEY}: expected an object, got {counters!r:.60}")
    counters = dict(counters)
    for name in ("recall_hits", "recall_misses", "bytes_asked", "bytes_moved"):
        if name in counters and not _is_number(counters[name]):
            raise TraceError(
                f"{path}: {KEY}.{name}: expected a number, got {counters[name]!r:.60}"
            )
    counters["steps"] = _read_steps(counters.get("steps", []), path)
    rate = hit_rate(counters.get("recall_hits", 0), counters.get("recall_misses", 0))
    if rate is not None:
        counters["hit_rate"] = rate
    return counters if len(counters) > 1 or counters["steps"] else {}


def hit_rate(hits: float, misses: float) -> float | None:
    """Share of the wanted tokens that were on the device already, 0 to 1; None of nothing."""
    return hits / (hits + misses) if hits + misses else None


def _read_steps(steps: Any, path: object) -> list[dict[str, Any]]:
    if not isinstance(steps, list):
        raise TraceError(f"{path}: {KEY}.steps: expected a list, got {steps!r:.60}")
    for i, step in enumerate(steps):
        if not isinstance(step, dict):
            raise TraceError(f"{path}: {KEY}.steps[{i}]: expected an object, got {step!r:.60}")
        for field in _STEP_FIELDS:
            if field in step and not _is_number(step[field]):
                value = step[field]
                raise TraceError(
                    f"{path}: {KEY}.steps[{i}].{field}: expected a number, got {value!r:.60}"
                )
    return [
        {**step, "hit_rate": hit_rate(step.get("hits", 0), step.get("misses", 0))}
        for step in steps
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
