"""Dense against ClusterKV: the numbers of two passes side by side, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusterkv_ops.profiling.measure import RunResult
from clusterkv_ops.profiling.tables import Table


@dataclass
class Summary:
    """What `run` tells.

    Attributes:
        settings: of the run, as the user gave them.
        sparse: the pass with ClusterKV.
        dense: the pass without; None where it was left out.
        clustering_s: seconds to cluster the prompt of every layer, timed alone.
        selection_s: seconds of selection in the profiled steps.
        stats: the backend's counters at the end.
    """

    settings: dict[str, Any]
    sparse: RunResult
    dense: RunResult | None
    clustering_s: float
    selection_s: float
    stats: dict[str, Any]

    @property
    def clustering_pct(self) -> float:
        """Clustering alone, as a share of the prefill."""
        return 100 * self.clustering_s / self.sparse.prefill_s

    @property
    def selection_pct(self) -> float:
        """Selection's share of the profiled decode steps."""
        profiled_s = sum(self.sparse.profiled_ms) / 1e3
        return 100 * self.selection_s / profiled_s if profiled_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """The section `run` of the JSON file."""
        dense = self.dense
        return {
            "settings": self.settings,
            "dense": None if dense is None else _numbers(dense),
            "sparse": {
                **_numbers(self.sparse),
                "clustering_pct_of_prefill": self.clustering_pct,
                "selection_pct_of_decode": self.selection_pct,
                "sparse_steps": self.stats["sparse_steps"],
                "dense_steps": self.stats["dense_steps"],
            },
            "ratio": None if dense is None else dense.ms_per_token / self.sparse.ms_per_token,
            "equal_tokens": None if dense is None else _num_equal(dense, self.sparse),
            "stats": self.stats,
        }


def summary_table(summary: Summary) -> Table:
    """A row a number, dense and ClusterKV beside each other."""
    dense, sparse = summary.dense, summary.sparse
    rows: list[list[str]] = []

    def row(name: str, show: Callable[[RunResult], str], ratio: float | None = None) -> None:
        shown = "-" if dense is None else show(dense)
        rows.append([name, shown, show(sparse), "" if ratio is None else f"{ratio:.2f}x"])

    def times(value: Callable[[RunResult], float]) -> float | None:
        return None if dense is None else value(dense) / value(sparse)

    row("prefill, s", lambda r: f"{r.prefill_s:.1f}", times(lambda r: r.prefill_s))
    row("ms per token", lambda r: f"{r.ms_per_token:.1f}", times(lambda r: r.ms_per_token))
    row("tokens/s", lambda r: f"{1e3 / r.ms_per_token:.1f}")
    row(
        "KV read per token, MB",
        lambda r: f"{r.kv_bytes_per_token / 1e6:.1f}",
        times(lambda r: r.kv_bytes_per_token),
    )
    row("perplexity, held out", lambda r: f"{r.perplexity:.3f}")
    rows += [
        ["clustering, % of prefill", "-", f"{summary.clustering_pct:.1f}", ""],
        ["selection, % of decode", "-", f"{summary.selection_pct:.1f}", ""],
        ["sparse / dense steps", "-", _steps(summary.stats), ""],
    ]
    if dense is not None:
        equal = f"{_num_equal(dense, sparse)} of {len(dense.tokens)}"
        rows.append(["tokens before the first difference", "-", equal, ""])
    return Table(_title(summary.settings), ["", "dense", "ClusterKV", "ratio"], rows)


def notes(summary: Summary) -> list[str]:
    """How the table's numbers were taken, a sentence each."""
    sparse = summary.sparse
    compiled = sparse.num_compiled_steps + (summary.dense or sparse).num_compiled_steps
    compile_s = sparse.compile_s + (summary.dense.compile_s if summary.dense else 0.0)
    settings = summary.settings
    return [
        f"ms per token: median over the {settings['tokens']} generated tokens. Calls that compile "
        f"are excluded ({compiled} of these), and so are {compile_s:.0f} s of compilation in all.",
        f"Perplexity of the document's next {settings['held_out']} tokens, one a step. Clustering "
        "timed alone on the same keys; selection in "
        f"{len(sparse.profiled_ms)} steps under the profiler. Steps are counted once a layer.",
    ]


def _title(settings: dict[str, Any]) -> str:
    return (
        f"{settings['model']}, {settings['dtype']}, {settings['device']}: "
        f"{settings['context']:,} tokens of context, budget {settings['budget']:,}"
    )


def _steps(stats: dict[str, Any]) -> str:
    return f"{stats['sparse_steps']:,} / {stats['dense_steps']:,}"


def _numbers(result: RunResult) -> dict[str, Any]:
    return {
        "prefill_s": result.prefill_s,
        "compile_s": result.compile_s,
        "ms_per_token": result.ms_per_token,
        "tokens_per_s": 1e3 / result.ms_per_token,
        "step_ms": result.step_ms,
        "num_compiled_steps": result.num_compiled_steps,
        "kv_bytes_per_token": result.kv_bytes_per_token,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
    }


def _num_equal(dense: RunResult, sparse: RunResult) -> int:
    pairs = zip(dense.tokens, sparse.tokens, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(dense.tokens))
