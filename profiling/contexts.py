"""In which phase, layer and call a thread was at every instant.

A thread's ranges nest. Walking them with a stack cuts the thread into segments of constant
context:

    clusterkv.decode   |---------------------------------------|
    clusterkv.layer.2      |----------------------------|
    aten::mm                 |-----|
    clusterkv.selection               |---------|
    segment            other |linear |other |selection | other
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from clusterkv_ops.profiling.phases import NOTHING, Rule, range_rule
from clusterkv_ops.profiling.trace import Range

# Timestamps are rounded: a range may seem to start this long before its predecessor ends.
_ROUNDING_NS = 2


class Context(NamedTuple):
    """What encloses an instant. `origin` is the range that decided the phase; `call` the range of
    the model's call."""

    phase: str | None = None
    is_own: bool = False
    layer: int | None = None
    waits_for: str | None = None
    origin: Range | None = None
    call: Range | None = None


class Segment(NamedTuple):
    """A stretch of a thread with one context."""

    start: int
    end: int
    context: Context


def segments(ranges: Iterable[Range], call_modes: frozenset[str]) -> list[Segment]:
    """Cuts one thread into segments, in order of time; instants in no range are in no segment.

    Args:
        ranges: the thread's ranges, in any order.
        call_modes: the modes whose ranges count as calls.
    """
    walk = _Walk()
    for item in sorted(ranges, key=lambda item: (item.start, -item.end)):
        walk.enter(item, range_rule(item.name), call_modes)
    walk.leave_all()
    return walk.segments


class _Walk:
    """The stack of open ranges while time moves on to `at`."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.stack: list[tuple[int, Context]] = []
        self.at = 0

    def enter(self, item: Range, rule: Rule, call_modes: frozenset[str]) -> None:
        stack = self.stack
        while stack:
            end = stack[-1][0]
            if end > item.start and (item.end <= end or end - item.start > _ROUNDING_NS):
                break
            self._leave()
        parent = stack[-1][1] if stack else Context()
        context = parent if rule is NOTHING else _inside(parent, item, rule, call_modes)
        if context is not parent or not stack:
            self._advance(item.start)
        stack.append((item.end, context))

    def leave_all(self) -> None:
        while self.stack:
            self._leave()

    def _leave(self) -> None:
        end, context = self.stack[-1]
        if len(self.stack) == 1 or self.stack[-2][1] is not context:
            self._advance(end)
        self.stack.pop()

    def _advance(self, time: int) -> None:
        """Moves to `time`; the time passed belongs to the innermost open range."""
        if time <= self.at:
            return
        if self.stack:
            self.segments.append(Segment(self.at, time, self.stack[-1][1]))
        self.at = time


def _inside(parent: Context, item: Range, rule: Rule, call_modes: frozenset[str]) -> Context:
    """The context inside a range: this package's innermost phase wins, a model's outermost."""
    if rule.mode is not None:
        return parent._replace(call=item) if rule.mode in call_modes else parent
    if rule.layer is not None:
        return parent._replace(layer=rule.layer)
    if rule.waits_for is not None:
        return parent._replace(waits_for=rule.waits_for)
    is_same = parent.phase == rule.phase and parent.is_own
    if is_same or (parent.phase is not None and not rule.is_own):
        return parent
    return parent._replace(phase=rule.phase, is_own=rule.is_own, origin=item)
