"""Times several ways of doing the same thing in turns, so that a busy machine hits all alike.

Shared by the benchmarks of this folder: rounds, medians, the table, the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from clusterkv_ops.profiling.machine import machine, machine_line

RESULTS = Path(__file__).parent / "results"


def interleaved(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds of every call of every way, `rounds` x `calls` of each.

    Args:
        ways: what to time, by name. Warm-up is the caller's.
        rounds: in each round every way has its turn, in a rotated order.
        calls: calls in a row in one turn.
        between: runs, untimed, before each call.
    """
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for _ in range(calls):
                between()
                start = time.perf_counter()
                ways[name]()
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each way."""
    return {name: median(values) for name, values in times.items()}


def minima(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The shortest call of each way: what a crowded machine comes closest to."""
    return {name: min(values) for name, values in times.items()}


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table whose first column is text."""
    names = list(head)
    lines = [names, ["---"] + ["---:"] * (len(names) - 1), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save(name: str, folder: Path, numbers: dict[str, Any], text: str) -> None:
    """Write `name`.json and `name`.md into `folder`, and print the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    answer = {"schema": f"clusterkv.benchmark.{name}/1", "machine": machine(), **numbers}
    (folder / f"{name}.json").write_text(json.dumps(answer, indent=1) + "\n")
    page = f"{text}\n\n{machine_line()}\n"
    (folder / f"{name}.md").write_text(page)
    print(page)
