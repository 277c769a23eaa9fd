"""What the backend found and what it did: `stats()` and `explain()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ClusterKVStats:
    """What a backend did so far.

    Attributes:
        graphs: graphs that Dynamo compiled with this backend.
        sites_rewritten, sites_skipped: attention calls in those graphs, rewritten or left alone.
        prefill_calls, extend_calls: calls with several new tokens, without and with a past; once
            a layer.
        sparse_steps, dense_steps: decode steps, once a layer.
        store_copies: how often keys and values were copied, because a cache was forked, put in
            another order, or made by something else.
        num_clusters: most clusters that a living index holds for a KV head.
        recall_hits, recall_misses: selected tokens found on the device / fetched (`offload`).
        kv_bytes_read: bytes of keys and values that decode steps read, in all.
        kv_bytes, index_bytes: held now, by all living caches.
    """

    graphs: int = 0
    sites_rewritten: int = 0
    sites_skipped: int = 0
    prefill_calls: int = 0
    extend_calls: int = 0
    sparse_steps: int = 0
    dense_steps: int = 0
    store_copies: int = 0
    num_clusters: int = 0
    recall_hits: int = 0
    recall_misses: int = 0
    kv_bytes_read: int = 0
    kv_bytes: int = 0
    index_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the selected tokens that were on the device, 0..1; 0 without `offload`."""
        asked = self.recall_hits + self.recall_misses
        return self.recall_hits / asked if asked else 0.0


class SiteReport(NamedTuple):
    """One attention call of one compiled graph."""

    graph: int
    path: str
    layer: int | None
    query_length: str
    idiom: str
    outcome: str


def table(reports: list[SiteReport]) -> str:
    """The reports as aligned text, a line each."""
    if not reports:
        return "no graph was compiled with this backend"
    head = ("graph", "module", "layer", "queries", "cache", "outcome")
    rows = [head] + [tuple("-" if x is None else str(x) for x in r) for r in reports]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
