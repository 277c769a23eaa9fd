"""`--fail-if` gates: conditions over a report that make a command fail.

prefill.clustering.exposed_pct>2      a field of a phase
decode.idle_pct>=10                   a field of a mode
counters.hit_rate<0.5                 a counter
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

from clusterkv_ops.profiling.accounting import ModeRow, PhaseRow
from clusterkv_ops.profiling.phases import MODES, PHASES
from clusterkv_ops.profiling.report import Report

_FORM = re.compile(r"\s*([\w.]+)\s*(>=|<=|>|<)\s*(-?[\d.]+(?:[eE][-+]?\d+)?)\s*$")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_PHASE_FIELDS = [f.name for f in fields(PhaseRow) if f.name not in ("mode", "phase")]
_MODE_FIELDS = [f.name for f in fields(ModeRow) if f.name not in ("mode", "unreliable")]


class Gate(NamedTuple):
    """A condition that must not hold."""

    text: str
    path: tuple[str, ...]
    compare: Callable[[float, float], bool]
    limit: float


def parse_gate(text: str) -> Gate:
    """Reads a condition. Raises `ValueError` with the words that are known."""
    found = _FORM.match(text)
    if not found:
        raise ValueError(f"fail-if: expected mode.phase.field>number, got {text!r}")
    path = tuple(found[1].split("."))
    if path[0] == "counters" and len(path) == 2:
        pass
    elif len(path) not in (2, 3):
        raise ValueError(f"fail-if: expected mode.phase.field>number, got {text!r}")
    else:
        _check_word("mode", path[0], MODES)
        if len(path) == 3:
            _check_word("phase", path[1], PHASES)
        _check_word("field", path[-1], _PHASE_FIELDS if len(path) == 3 else _MODE_FIELDS)
    try:
        limit = float(found[3])
    except ValueError:
        raise ValueError(f"fail-if: expected a number, got {found[3]!r}") from None
    return Gate(text, path, _COMPARE[found[2]], limit)


def failures(gates: list[Gate], report: Report) -> list[str]:
    """One sentence for each gate whose condition holds, or that can't be judged.

    Raises:
        ValueError: the trace has no such mode or counter.
    """
    found = []
    for gate in gates:
        value = _value(gate, report)
        if value is None:
            found.append(f"{gate.text}: the value is unreliable")
        elif gate.compare(value, gate.limit):
            found.append(f"{gate.text}: it is {value:.6g}")
    return found


def _value(gate: Gate, report: Report) -> float | None:
    """The number a gate looks at; a phase that never ran took no time."""
    if gate.path[0] == "counters":
        value = report.counters.get(gate.path[1])
        if not isinstance(value, (int, float)):
            raise ValueError(f"fail-if: {gate.text}: the trace has no such counter")
        return value
    mode = report.mode(gate.path[0])
    if mode is None:
        raise ValueError(f"fail-if: {gate.text}: the trace has no {gate.path[0]}")
    if len(gate.path) == 2:
        return _number(mode, gate.path[1])
    if mode.unreliable:
        return None
    row = report.phase(gate.path[0], gate.path[1])
    return 0.0 if row is None else _number(row, gate.path[2])


def _number(row: ModeRow | PhaseRow, field: str) -> float | None:
    value: float | None = getattr(row, field)
    return value


def _check_word(what: str, word: str, known: list[str] | tuple[str, ...]) -> None:
    if word not in known:
        raise ValueError(f"fail-if: {what}: expected one of {', '.join(known)}, got {word!r}")
