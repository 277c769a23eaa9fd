"""Copies between host and device: how much, how fast, and how much of it under a kernel."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from clusterkv_ops.profiling.accounting import Account, percent
from clusterkv_ops.profiling.intervals import intersect, merge, total
from clusterkv_ops.profiling.timeline import Span, Timeline


@dataclass(frozen=True)
class CopyRow:
    """One kind of copy, named as in the trace. `hidden_pct` is its share under any kernel."""

    mode: str
    kind: str
    count: int
    bytes: int
    busy_us: float
    hidden_pct: float
    gb_per_s: float
    is_pageable: bool


def copy_rows(accounted: Account, timeline: Timeline) -> list[CopyRow]:
    """One row for each kind, the longest first."""
    by_kind: dict[str, list[Span]] = defaultdict(list)
    for span in accounted.spans:
        if span.kind == "copy":
            by_kind[span.name].append(span)
    kernels = merge((s.start, s.end) for s in timeline.spans if s.kind == "kernel")
    rows = []
    for kind, spans in by_kind.items():
        busy = merge((span.start, span.end) for span in spans)
        moved, time = sum(span.bytes for span in spans), total(busy)
        hidden = percent(total(intersect(busy, kernels)), time)
        speed = moved / time if time else 0.0
        is_pageable = "Pageable" in kind
        row = CopyRow(
            accounted.mode, kind, len(spans), moved, time / 1e3, hidden, speed, is_pageable
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -row.busy_us)
