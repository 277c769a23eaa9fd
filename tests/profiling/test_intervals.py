"""The interval algebra against a bitmap: one bit an instant."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from clusterkv_ops.profiling import intervals

LENGTH = 90
bounds = st.integers(0, LENGTH)
short = st.tuples(bounds, st.integers(0, 3)).map(lambda pair: (pair[0], min(LENGTH, sum(pair))))
raw = st.lists(st.tuples(bounds, bounds), max_size=8) | st.lists(short, max_size=60)
merged = raw.map(intervals.merge)


def bitmap(pieces):
    bits = [False] * (LENGTH + 1)
    for start, end in pieces:
        for instant in range(start, end):
            bits[instant] = True
    return bits


def is_canonical(pieces):
    """Sorted, disjoint, not touching, not empty."""
    is_ordered = all(a[1] < b[0] for a, b in pairwise(pieces))
    return is_ordered and all(start < end for start, end in pieces)


@given(raw)
def test_merge_is_the_union_of_any_intervals(pieces):
    result = intervals.merge(pieces)
    assert is_canonical(result)
    assert bitmap(result) == bitmap(pieces)


@given(merged)
def test_total_counts_the_instants(pieces):
    assert intervals.total(pieces) == sum(bitmap(pieces))


@given(merged, merged)
def test_union_intersect_and_subtract_equal_their_bitmaps(left, right):
    a, b = bitmap(left), bitmap(right)
    union = intervals.union(left, right)
    common = intervals.intersect(left, right)
    rest = intervals.subtract(left, right)
    assert bitmap(union) == [x or y for x, y in zip(a, b, strict=True)]
    assert bitmap(common) == [x and y for x, y in zip(a, b, strict=True)]
    assert bitmap(rest) == [x and not y for x, y in zip(a, b, strict=True)]
    assert is_canonical(union)
    assert is_canonical(common)
    assert is_canonical(rest)


@given(merged, st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_clip_and_gaps_split_a_window(pieces, start, end):
    inside = intervals.clip(pieces, start, end)
    free = intervals.gaps(pieces, start, end)
    assert inside == intervals.intersect(pieces, intervals.merge([(start, end)]))
    assert intervals.total(inside) + intervals.total(free) == max(0, end - start)
    assert intervals.intersect(inside, free) == []


@given(merged, merged)
def test_subtract_and_intersect_partition_the_left_side(left, right):
    parts = intervals.union(intervals.intersect(left, right), intervals.subtract(left, right))
    assert parts == left
