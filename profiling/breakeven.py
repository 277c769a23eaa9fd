"""From which context length on sparse decoding is faster than dense."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from clusterkv_ops.profiling.reader import TraceError
from clusterkv_ops.profiling.tables import Table

SCHEMA = "clusterkv.breakeven/1"


@dataclass(frozen=True)
class Point:
    """One context length: milliseconds a token of both ways."""

    context: int
    dense_ms: float
    sparse_ms: float


@dataclass(frozen=True)
class Breakeven:
    """The measured points in order, and the context where the lines cross.

    `crossing` is None where sparse never stays ahead, and the shortest context where it always is.
    """

    points: list[Point]
    crossing: float | None


def break_even(points: list[Point]) -> Breakeven:
    """Finds the crossing behind which sparse stays faster, linear between measured contexts.

    Raises:
        ValueError: no point, two of one context, or a time that is not positive.
    """
    ordered = sorted(points, key=lambda point: point.context)
    if not ordered:
        raise ValueError("points: expected at least one, got none")
    for point in ordered:
        times = (point.dense_ms, point.sparse_ms)
        if not all(math.isfinite(time) and time > 0 for time in times):
            raise ValueError(f"points: expected positive times at {point.context}, got {times}")
    for left, right in pairwise(ordered):
        if left.context == right.context:
            raise ValueError(f"points: expected one of each context, got two of {left.context}")
    return Breakeven(ordered, _crossing(ordered))


def breakeven_table(found: Breakeven) -> Table:
    """The points, and what follows from them as the title."""
    rows = [
        [
            f"{point.context:,}",
            f"{point.dense_ms:.2f}",
            f"{point.sparse_ms:.2f}",
            f"{point.dense_ms / point.sparse_ms:.2f}x",
        ]
        for point in found.points
    ]
    columns = ["context", "dense ms/token", "sparse ms/token", "speedup"]
    return Table(sentence(found), columns, rows, 0)


def sentence(found: Breakeven) -> str:
    """The result in words."""
    first, last = found.points[0].context, found.points[-1].context
    if found.crossing is None:
        return f"Sparse decoding does not break even up to {last:,} tokens"
    if found.crossing == first:
        return f"Sparse decoding is faster from the shortest context on, {first:,} tokens"
    return f"Sparse decoding breaks even at {found.crossing:,.0f} tokens"


def to_json(found: Breakeven) -> dict[str, object]:
    """As a JSON object of schema `clusterkv.breakeven/1`."""
    return {"schema": SCHEMA, **asdict(found)}


def load_points(path: str | Path) -> list[Point]:
    """Points of an earlier result. Raises `TraceError` naming file and field."""
    try:
        data = json.loads(Path(path).read_text())
        return [Point(**item) for item in data["points"]]
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{path}: points: expected context, dense_ms, sparse_ms: {error}"
        ) from None


def save_plot(found: Breakeven, path: str | Path) -> None:
    """Both lines over the context, and the crossing."""
    from clusterkv_ops.profiling.png import new_figure

    figure, (axes,) = new_figure([4.0])
    contexts = [point.context for point in found.points]
    axes.plot(contexts, [point.dense_ms for point in found.points], "s--", label="dense")
    axes.plot(contexts, [point.sparse_ms for point in found.points], "o-", label="ClusterKV")
    if found.crossing is not None:
        axes.axvline(found.crossing, color="#d32f2f", linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("ms per token")
    axes.set_title(sentence(found), loc="left", fontweight="bold")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def _crossing(points: list[Point]) -> float | None:
    gains = [(point.context, point.dense_ms - point.sparse_ms) for point in points]
    if gains[-1][1] <= 0:
        return None
    behind = [i for i, (_, gain) in enumerate(gains) if gain <= 0]
    if not behind:
        return float(gains[0][0])
    (left, loss), (right, gain) = gains[behind[-1]], gains[behind[-1] + 1]
    return left + (right - left) * -loss / (gain - loss)
