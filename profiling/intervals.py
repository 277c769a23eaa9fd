"""Algebra of time: sorted, disjoint, half-open intervals [start, end) in integer nanoseconds.

Every function but `merge` expects such a list and returns one. Cost is linear in the lists'
lengths; `clip` is logarithmic in what it leaves out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Interval = tuple[int, int]
Intervals = list[Interval]

# Windows are looked up in a list that is this much longer; else both lists are walked.
_FEW = 16


def merge(intervals: Iterable[Interval]) -> Intervals:
    """The union of any intervals, in any order; empty ones vanish, touching ones join."""
    merged: Intervals = []
    last_start, last_end = 0, -1
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= last_end:
            if end > last_end:
                last_end = end
                merged[-1] = (last_start, last_end)
        else:
            last_start, last_end = start, end
            merged.append((start, end))
    return merged


def total(intervals: Intervals) -> int:
    """Nanoseconds covered."""
    return sum(end - start for start, end in intervals)


def union(left: Intervals, right: Intervals) -> Intervals:
    """Instants in either list."""
    return merge([*left, *right])


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Instants in both lists."""
    if _FEW * len(right) < len(left):
        return [piece for window in right for piece in clip(left, *window)]
    if _FEW * len(left) < len(right):
        return intersect(right, left)
    common: Intervals = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """Instants of `left` that are not in `right`."""
    rest: Intervals = []
    first = 0
    for start, end in left:
        while first < len(right) and right[first][1] <= start:
            first += 1
        j = first
        while j < len(right) and right[j][0] < end:
            if right[j][0] > start:
                rest.append((start, right[j][0]))
            start = right[j][1]
            j += 1
        if start < end:
            rest.append((start, end))
    return rest


def clip(intervals: Intervals, start: int, end: int) -> Intervals:
    """The part of `intervals` inside [start, end)."""
    if start >= end:
        return []
    first = bisect_right(intervals, start, key=lambda interval: interval[1])
    last = bisect_left(intervals, end, key=lambda interval: interval[0])
    inside = intervals[first:last]
    return [(max(a, start), min(b, end)) for a, b in inside]


def gaps(intervals: Intervals, start: int, end: int) -> Intervals:
    """Instants of [start, end) that `intervals` leaves free."""
    return subtract([(start, end)] if start < end else [], intervals)
