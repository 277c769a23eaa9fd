"""The report in one or two sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterkv_ops.profiling.phases import OVERHEAD

if TYPE_CHECKING:
    from clusterkv_ops.profiling.report import Report

UNRELIABLE = "unreliable"


def headline(report: Report) -> str:
    """What the trace says about the method's overhead, in words."""
    sentences = [_prefill(report), _decode(report)]
    known = [sentence for sentence in sentences if sentence]
    return " ".join(known) if known else _foreign(report)


def milliseconds(microseconds: float) -> str:
    """Three significant digits, in the unit that suits."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.3g} s"
    return f"{microseconds / 1e3:.3g} ms" if microseconds >= 1e3 else f"{microseconds:.3g} us"


def share(percent: float | None) -> str:
    """A percentage; rounding of timestamps makes less than 0.05 % meaningless."""
    if percent is None:
        return UNRELIABLE
    return "0 %" if abs(percent) < 0.05 else f"{percent:.3g} %"


def _prefill(report: Report) -> str:
    mode = report.mode("prefill")
    if mode is None:
        return ""
    if mode.unreliable:
        return f"Prefill {milliseconds(mode.wall_us)}: {UNRELIABLE}, {mode.unreliable}."
    row = report.phase("prefill", "clustering")
    if row is None:
        return f"Prefill {milliseconds(mode.wall_us)}, without clustering."
    return (
        f"Prefill {milliseconds(mode.wall_us)}: clustering {milliseconds(row.busy_us)} = "
        f"{share(row.busy_pct)} of it, {share(row.hidden_pct)} hidden."
    )


def _decode(report: Report) -> str:
    mode = report.mode("decode")
    if mode is None or not mode.calls:
        return ""
    step = f"A decode step {milliseconds(mode.wall_us / mode.calls)}"
    if mode.unreliable:
        return f"{step}: {UNRELIABLE}, {mode.unreliable}."
    rows = [report.phase("decode", phase) for phase in OVERHEAD]
    parts = [f"{row.phase} {share(row.exposed_pct)}" for row in rows if row and row.exposed_us]
    exposed = sum(row.exposed_pct or 0 for row in rows if row)
    text = f"{step}: {share(exposed)} exposed overhead"
    text += f" ({', '.join(parts)})" if len(parts) > 1 else f", {parts[0]}" if parts else ""
    rate = report.counters.get("hit_rate")
    return f"{text}; hit rate {share(100 * rate)}." if rate is not None else f"{text}."


def _foreign(report: Report) -> str:
    mode = report.mode("all")
    if mode is None or not mode.wall_us:
        return "The trace is empty."
    text = f"{milliseconds(mode.wall_us)}: model compute {share(mode.model_pct)}"
    return f"{text}, idle {share(mode.idle_pct)}."
