"""How much of the overhead overlap really hides: three runs against the wall clock.

    hiding = 1 - (overlap - base) / (serial - base)

`base` runs without the method, `serial` with everything on the main lane, `overlap` as it is
meant. Unprofiled times (counters.unprofiled, see docs/profiling.md) are the honest ones; without
them the traces' own walls are used, and the row says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterkv_ops.profiling.headline import UNRELIABLE, milliseconds, share
from clusterkv_ops.profiling.phases import SHOWN
from clusterkv_ops.profiling.report import Report
from clusterkv_ops.profiling.tables import Table

# Serial must be slower than base by this share of it, or the quotient is noise.
_LEAST_OVERHEAD = 0.005


@dataclass(frozen=True)
class HidingRow:
    """One mode of the three runs. `hiding_pct` is None where serial is not slower than base."""

    mode: str
    base_us: float
    serial_us: float
    overlap_us: float
    hiding_pct: float | None
    is_profiled: bool


@dataclass(frozen=True)
class DifferenceRow:
    """Exposed time of one phase in the three runs, for each call of the mode."""

    mode: str
    phase: str
    base_us: float
    serial_us: float
    overlap_us: float


def hiding_rows(base: Report, serial: Report, overlap: Report) -> list[HidingRow]:
    """One row for each mode that all three runs have."""
    rows = []
    for mode in ("prefill", "extend", "decode", "step"):
        runs = (base, serial, overlap)
        if any(run.mode(mode) is None for run in runs):
            continue
        known = [unprofiled_us(run, mode) for run in runs]
        times = [time for time in known if time is not None]
        is_profiled = len(times) < len(runs)
        if is_profiled:
            times = [_wall_of_a_call(run, mode) for run in runs]
        first, second, third = times
        hidden = hiding_pct(first, second, third)
        rows.append(HidingRow(mode, first, second, third, hidden, is_profiled))
    return rows


def hiding_pct(base: float, serial: float, overlap: float) -> float | None:
    """100 * (1 - (overlap - base) / (serial - base)); None where that says nothing."""
    if serial - base <= _LEAST_OVERHEAD * base:
        return None
    return 100 * (1 - (overlap - base) / (serial - base))


def difference_rows(base: Report, serial: Report, overlap: Report) -> list[DifferenceRow]:
    """One row for each mode and phase that any run has."""
    rows = []
    for mode in ("prefill", "extend", "decode", "step"):
        if any(run.mode(mode) is None for run in (base, serial, overlap)):
            continue
        for phase in (*SHOWN, "idle"):
            times = [_exposed_of_a_call(run, mode, phase) for run in (base, serial, overlap)]
            if any(times):
                rows.append(DifferenceRow(mode, phase, *times))
    return rows


def comparison_tables(base: Report, serial: Report, overlap: Report) -> list[Table]:
    """The comparison as tables of text."""
    hiding = hiding_rows(base, serial, overlap)
    differences = difference_rows(base, serial, overlap)
    columns = ["mode", "clock", "base", "serial", "overlap", "hidden"]
    walls = [
        [
            row.mode,
            "profiled" if row.is_profiled else "unprofiled",
            *map(milliseconds, (row.base_us, row.serial_us, row.overlap_us)),
            UNRELIABLE if row.hiding_pct is None else share(row.hiding_pct),
        ]
        for row in hiding
    ]
    phases = [
        [
            row.mode,
            row.phase,
            *map(milliseconds, (row.base_us, row.serial_us, row.overlap_us)),
            f"{(row.overlap_us - row.serial_us) / 1e3:+.3f} ms",
        ]
        for row in differences
    ]
    columns_of_phases = ["mode", "phase", "base", "serial", "overlap", "overlap - serial"]
    return [
        Table("Wall clock of a call", columns, walls, 2),
        Table("Exposed time of a call", columns_of_phases, phases, 2),
    ]


def unprofiled_us(report: Report, mode: str) -> float | None:
    """The time of one call that was measured while no profiler ran."""
    measured = report.counters.get("unprofiled")
    value = measured.get(f"{mode}_ms") if isinstance(measured, dict) else None
    return 1e3 * value if isinstance(value, (int, float)) else None


def _wall_of_a_call(report: Report, mode: str) -> float:
    row = report.mode(mode)
    return row.wall_us / max(row.calls, 1) if row else 0.0


def _exposed_of_a_call(report: Report, mode: str, phase: str) -> float:
    row = report.mode(mode)
    if row is None:
        return 0.0
    piece = report.phase(mode, phase)
    time = row.idle_us if phase == "idle" else piece.exposed_us if piece else 0.0
    return time / max(row.calls, 1)
