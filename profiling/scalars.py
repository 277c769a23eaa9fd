"""A report as TensorBoard scalars: tags, steps, and the layout of the Custom Scalars tab."""

from __future__ import annotations

from typing import NamedTuple

from clusterkv_ops.profiling.report import Report


class Scalar(NamedTuple):
    """One point of one curve."""

    tag: str
    value: float
    step: int


# Title -> charts, each a title and the tags it shows. A tag is a regular expression: unanchored
# ones match too much, or nothing.
LAYOUT = {
    "ClusterKV": {
        "Hidden under the model, %": ["Multiline", [r"^clusterkv/hidden_pct/.*$"]],
        "Exposed, ms": ["Multiline", [r"^clusterkv/exposed_ms/.*$"]],
        "Milliseconds a call": ["Multiline", [r"^clusterkv/ms/.*$"]],
        "Hit rate": ["Multiline", [r"^clusterkv/cache/hit_rate$"]],
    }
}


def scalars(report: Report) -> list[Scalar]:
    """Every step of every mode: its wall, exposed and hidden time, and the cache's hit rate."""
    points: list[Scalar] = []
    unreliable = {row.mode for row in report.modes if row.unreliable}
    for row in report.steps:
        points.append(Scalar(f"clusterkv/ms/{row.mode}", row.wall_us / 1e3, row.step))
        if row.mode in unreliable:
            continue
        points += [
            Scalar(f"clusterkv/exposed_ms/{row.mode}/{phase}", time / 1e3, row.step)
            for phase, time in row.exposed_us.items()
            if phase in row.hidden_pct
        ]
        points += [
            Scalar(f"clusterkv/hidden_pct/{row.mode}/{phase}", share, row.step)
            for phase, share in row.hidden_pct.items()
        ]
    for i, step in enumerate(report.counters.get("steps", [])):
        if step.get("hit_rate") is not None:
            point = Scalar("clusterkv/cache/hit_rate", step["hit_rate"], int(step.get("step", i)))
            points.append(point)
    return points
