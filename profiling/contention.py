"""How much slower model kernels run while another lane is busy: overlap is not free."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from clusterkv_ops.profiling.intervals import clip, merge
from clusterkv_ops.profiling.phases import MODEL
from clusterkv_ops.profiling.timeline import Span, Timeline


@dataclass(frozen=True)
class ContentionRow:
    """One kernel or operator of the main lane, by whether another lane worked at the same time."""

    name: str
    alone: int
    overlapped: int
    alone_us: float
    overlapped_us: float
    slowdown_pct: float


# A mean over fewer says nothing.
_FEWEST = 3


def contention_rows(timeline: Timeline, limit: int = 10) -> list[ContentionRow]:
    """The `limit` names with most overlapped time that ran both ways; durations are means."""
    main = timeline.main_lane
    others = merge((s.start, s.end) for s in timeline.spans if s.lane != main)
    alone: dict[str, list[int]] = defaultdict(list)
    overlapped: dict[str, list[int]] = defaultdict(list)
    for span in timeline.spans:
        if span.lane == main and _is_whole_work(span):
            group = overlapped if clip(others, span.start, span.end) else alone
            group[span.name].append(span.end - span.start)
    rows = [
        _row(name, alone[name], overlapped[name])
        for name in overlapped
        if min(len(overlapped[name]), len(alone[name])) >= _FEWEST
    ]
    return sorted(rows, key=lambda row: -row.overlapped * row.overlapped_us)[:limit]


def slowdown_pct(rows: list[ContentionRow]) -> float | None:
    """All rows as one number, weighted by the overlapped time; None without rows."""
    expected = sum(row.overlapped * row.alone_us for row in rows)
    measured = sum(row.overlapped * row.overlapped_us for row in rows)
    return 100 * (measured / expected - 1) if expected else None


def _is_whole_work(span: Span) -> bool:
    """Segments of bare Python between operators say nothing about contention."""
    return span.phase in MODEL and (span.kind == "kernel" or span.phase != "other")


def _row(name: str, alone: list[int], overlapped: list[int]) -> ContentionRow:
    before, after = fmean(alone) / 1e3, fmean(overlapped) / 1e3
    slowdown = 100 * (after / before - 1) if before else 0.0
    return ContentionRow(name, len(alone), len(overlapped), before, after, slowdown)
