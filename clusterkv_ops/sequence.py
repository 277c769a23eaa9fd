"""Sequence: what one layer knows about one batch of sequences, besides their keys and values.

It holds the index, which tokens it covers, the recall cache, and the clustering that runs on the
side. Keys and values come in with every call; who owns them is not its business.

Shapes: B batch, Hq / Hkv heads, T tokens held, S selected tokens, D head_dim.

    a row:  padding | sinks | segment 0 (prompt) | segment 1 | ... | recent |
                    ^start                                         ^clustered_end
                                                                            ^kv_len
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from clusterkv_ops.clustering import initial_tokens
from clusterkv_ops.config import ClusterKVConfig
from clusterkv_ops.counters import Counters
from clusterkv_ops.dense import dense_attention, first_visible_tokens, is_windowed
from clusterkv_ops.lanes import Lane, MainLane, Task, side_lane
from clusterkv_ops.ranges import named_range
from clusterkv_ops.recall import empty_cache
from clusterkv_ops.types import ClusterIndex, RecallCache

ops = torch.ops.clusterkv

WITHIN_BUDGET = "everything fits the budget"
DENSE_LAYER = "one of the first dense_layers"
NOT_CLUSTERED = "the cache was not built by this backend: its tokens are being clustered"


class Segment(NamedTuple):
    """A stretch of tokens that was clustered among itself: ends of its tokens and clusters."""

    token_end: int
    cluster_end: int


class Sequence:
    """The state of one layer for one batch of sequences.

    Attributes:
        layer: number of the layer in its model; the first `dense_layers` stay dense.
        kv_len: tokens held so far, padding included.
        unsupported: why this sequence has to attend densely, empty if it hasn't.
        index_bytes: bytes of the index, its room to grow included.
    """

    def __init__(
        self,
        config: ClusterKVConfig,
        counters: Counters,
        *,
        layer: int = 0,
        on_dense: Callable[[str, int], None] = lambda reason, kv_len: None,
    ) -> None:
        self.config = config
        self.counters = counters
        self.layer = layer
        self.is_dense_layer = layer < config.dense_layers
        self.on_dense = on_dense
        self.kv_len = 0
        self.unsupported = ""
        self._starts: list[int] = []
        self._segments: list[Segment] = []
        self._index: ClusterIndex | None = None
        self._cache: RecallCache | None = None
        self._pending: Task[None] | None = None
        self._is_foreign = False
        self._spans: Tensor | None = None
        self._spans_end = 0
        self._lane: Lane = side_lane("clustering") if config.async_clustering else MainLane()

    @property
    def clustered_end(self) -> int:
        return self._segments[-1].token_end if self._segments else 0

    @property
    def num_clusters(self) -> int:
        return self._segments[-1].cluster_end if self._segments else 0

    @property
    def index_bytes(self) -> int:
        parts = self._index or ()
        return sum(part.numel() * part.element_size() for part in parts)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        num_new: int,
        scale: float,
        is_causal: bool,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attention of `query` `[B, Hq, n, D]` over tokens whose last `num_new` are new.

        `keys` and `values` `[B, Hkv, T, D]` hold every token; with `new`, the same tokens as the
        model made them, which is what a prompt attends to.
        """
        past = self.kv_len
        self.kv_len = past + num_new
        mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
        if past == 0 or len(self._starts) != query.shape[0]:
            self._read_mask(query.shape[0], mask, is_prompt=past == 0)
        if query.shape[2] == 1 and past > 0:
            return self._decode(query, keys, values, mask, scale, is_causal)
        if past == 0:
            self.counters.add(prefill_calls=1)
            self._cluster_if_due(keys, is_prompt=True)
            keys, values = new or (keys, values)
            return dense_attention(query, keys, values, mask, scale, is_causal)
        self.counters.add(extend_calls=1)
        out = dense_attention(query, keys, values, mask, scale, is_causal)
        self._cluster_if_due(keys)
        return out

    def adopt(self, kv_len: int) -> None:
        """Start from `kv_len` tokens that something else has cached."""
        self.kv_len = kv_len
        self._is_foreign = kv_len > 0

    def restart(self, kv_len: int) -> None:
        """Forget everything; start from `kv_len` tokens that something else has written."""
        self.settle()
        self._starts, self._segments, self.unsupported = [], [], ""
        self._index = self._cache = self._spans = None
        self.adopt(kv_len)

    def crop(self, kv_len: int) -> None:
        """Forget the tokens from `kv_len` on. A segment that is cut becomes recent again."""
        self.settle()
        self.kv_len = kv_len
        self._segments = [s for s in self._segments if s.token_end <= kv_len]
        self._spans = None
        self._cache = None
        if self._index is not None:
            end = self.num_clusters
            self._index.indptr[..., end + 1 :] = self._index.indptr[..., end : end + 1].clone()

    def fork(self, kv_len: int, rows: Tensor | None = None) -> Sequence:
        """A sequence of its own with the first `kv_len` tokens, of all rows or of `rows`."""
        self.settle()
        other = Sequence(self.config, self.counters, layer=self.layer, on_dense=self.on_dense)
        other.unsupported = self.unsupported
        chosen = range(len(self._starts)) if rows is None else rows.tolist()
        other._starts = [self._starts[row] for row in chosen] if self._starts else []
        other._segments = list(self._segments)
        if self._index is not None:
            parts = (part.clone() if rows is None else part[rows] for part in self._index)
            other._index = ClusterIndex(*parts)
        other.crop(kv_len)
        return other

    def settle(self) -> None:
        """Wait for the clustering that runs on the side."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            with named_range("clusterkv.wait.clustering"):
                pending.wait()
        except BaseException:
            self._segments.pop()
            raise

    def _read_mask(self, batch: int, mask: Tensor | None, *, is_prompt: bool) -> None:
        """Learn where each row's tokens begin, from the last row of a mask."""
        self._starts = [0] * batch
        if mask is None or mask.shape[2] == 0:
            return
        starts = first_visible_tokens(mask, self.kv_len, batch)
        if starts is None:
            self.unsupported = "the mask hides tokens that are neither padding nor the future"
        elif is_prompt and is_windowed(mask, starts, self.kv_len):
            self.unsupported = "the mask is a sliding window"
        else:
            self._starts = starts

    def _decode(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        is_causal: bool,
    ) -> Tensor:
        self.settle()
        if self._is_foreign:
            self._is_foreign, reason = False, NOT_CLUSTERED
        else:
            if self._num_recent() > self.config.recluster_interval:
                self._cluster_if_due(keys)
                self.settle()
            reason = self._reason_to_be_dense(is_causal, mask, keys)
        if reason:
            self._count_dense(reason, keys)
            out = self._attend_to_all(query, keys, values, mask, scale, is_causal)
        else:
            out = self._attend_to_selected(query, keys, values, mask, scale)
        if reason is not NOT_CLUSTERED:
            self._cluster_if_due(keys)
        return out

    def _num_recent(self) -> int:
        """Tokens that no segment holds and that are no sinks, in the longest row."""
        first = self.clustered_end or min(self._starts) + self.config.num_sink_tokens
        return self.kv_len - first

    def _reason_to_be_dense(self, is_causal: bool, mask: Tensor | None, keys: Tensor) -> str:
        if self.is_dense_layer:
            return DENSE_LAYER
        if self.unsupported:
            return self.unsupported
        if is_causal:
            return "is_causal with one query sees the first token only"
        if mask is None and keys.shape[2] != self.kv_len:
            return "attention without a mask over a buffer that isn't full"
        sinks = self.config.num_sink_tokens
        clustered = self.clustered_end - min(self._starts) - sinks
        return "" if clustered > self.config.selected_tokens else WITHIN_BUDGET

    def _count_dense(self, reason: str, keys: Tensor) -> None:
        batch, heads, _, head_dim = keys.shape
        row_bytes = 2 * head_dim * keys.element_size()
        tokens = batch * self.kv_len - sum(self._starts)
        self.counters.add(dense_steps=1, kv_bytes_read=tokens * heads * row_bytes)
        if reason not in (DENSE_LAYER, WITHIN_BUDGET):
            self.on_dense(reason, self.kv_len)

    def _attend_to_all(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        is_causal: bool,
    ) -> Tensor:
        batch, heads = keys.shape[:2]
        if is_causal or (mask is None and keys.shape[2] != self.kv_len):
            return dense_attention(query, keys, values, mask, scale, is_causal)
        spans = self._spans_up_to(0, keys.device)
        nothing = torch.empty(batch, heads, 0, dtype=torch.int32, device=keys.device)
        mask = None if mask is None else mask.expand(batch, -1, -1, -1)
        args = (query, keys, values, nothing, spans, mask, None, None, None, scale)
        out: Tensor = ops.selected_attention(*args)[0]
        return out

    def _attend_to_selected(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        config, index = self.config, self._index
        assert index is not None
        selected, _ = ops.select_clusters(
            query, *index, config.selected_tokens, config.head_rule, scale
        )
        slots: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if config.offload:
            slots = self._recall(keys, values, selected)
        spans = self._spans_up_to(self.clustered_end, keys.device)
        mask = None if mask is None else mask.expand(query.shape[0], -1, -1, -1)
        out: Tensor = ops.selected_attention(
            query, keys, values, selected, spans, mask, *slots, scale
        )[0]
        self.counters.add(sparse_steps=1, kv_bytes_read=self._sparse_bytes(keys, selected))
        return out

    def _recall(
        self, keys: Tensor, values: Tensor, selected: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps = self.config.recall_steps
        if self._cache is None:
            groups = selected.shape[1] // keys.shape[1]
            num_slots = (steps + 1) * selected.shape[2] * groups
            self._cache = empty_cache(keys, num_slots=num_slots)
        slots, hits, misses = ops.recall(keys, values, selected, *self._cache, steps)
        self.counters.add_on_device(recall_hits=hits, recall_misses=misses)
        return slots, self._cache.slot_keys, self._cache.slot_values

    def _sparse_bytes(self, keys: Tensor, selected: Tensor) -> int:
        """Bytes of K and V that a sparse step reads, once for each head that reads them."""
        _, heads, _, head_dim = keys.shape
        always = selected_rows = 0
        for start in self._starts:
            sinks = start + self.config.num_sink_tokens
            clustered = max(0, self.clustered_end - sinks)
            always += self.kv_len - start - clustered
            selected_rows += min(clustered, self.config.selected_tokens)
        rows = always * heads + selected_rows * selected.shape[1]
        return rows * 2 * head_dim * keys.element_size()

    def _spans_up_to(self, clustered_end: int, device: torch.device) -> Tensor:
        """`[B, 2, 2]`: begin and end of the sinks and of the recent tokens of each row.

        With `clustered_end` 0 no token counts as clustered, so the spans cover everything.
        """
        if self._spans is None or self._spans_end != clustered_end:
            rows = []
            for start in self._starts:
                sinks = start + self.config.num_sink_tokens
                rows.append([[start, sinks], [max(clustered_end, sinks), self.kv_len]])
            self._spans = torch.tensor(rows, dtype=torch.int32, device=device)
            self._spans_end = clustered_end
        self._spans[:, 1, 1] = self.kv_len
        return self._spans

    def _cluster_if_due(self, keys: Tensor, *, is_prompt: bool = False) -> None:
        """Start to cluster the tokens that no segment holds, once they are many enough."""
        config = self.config
        if self.is_dense_layer or self.unsupported or self.kv_len <= config.budget:
            return
        enough = config.tokens_per_cluster if is_prompt else config.recluster_interval
        if self._num_recent() >= enough:
            self.settle()
            self._start_clustering(keys, self.clustered_end)

    def _start_clustering(self, keys: Tensor, begin: int) -> None:
        config, end = self.config, self.kv_len
        sinks = config.num_sink_tokens
        firsts = [min(max(begin, start + sinks), end) for start in self._starts]
        counts = [self._clusters_for(end - first, is_first=begin == 0) for first in firsts]
        valid = torch.tensor([[first - begin, end - begin] for first in firsts], dtype=torch.int32)
        valid = valid.to(keys.device)
        initial = initial_tokens(
            valid,
            torch.tensor(counts),
            kv_len=end - begin,
            max_clusters=max(counts),
            seed=config.seed,
        )
        first_cluster = self.num_clusters
        index = self._reserve(keys, first_cluster + max(counts), end)
        window = keys[:, :, begin:end]

        def cluster() -> None:
            with named_range(f"clusterkv.layer.{self.layer}"):
                ops.extend_index_(
                    *index, window, initial, valid, first_cluster, begin, config.max_iter
                )

        self._segments.append(Segment(end, first_cluster + max(counts)))
        self._spans = None
        self._pending = self._lane.submit(cluster)

    def _clusters_for(self, num_tokens: int, *, is_first: bool) -> int:
        """Clusters for a row's stretch of tokens, by the rule of prompts or of windows."""
        config = self.config
        if num_tokens <= 0:
            return 0
        if is_first:
            return max(1, num_tokens // config.tokens_per_cluster)
        share = num_tokens * config.clusters_per_interval / config.recluster_interval
        return max(1, min(num_tokens, round(share)))

    def _reserve(self, keys: Tensor, num_clusters: int, num_tokens: int) -> ClusterIndex:
        """The index with room for that many clusters and tokens, and for some more."""
        old = self._index
        room = (0, 0) if old is None else (old.centroids.shape[2], old.indices.shape[2])
        if old is not None and num_clusters <= room[0] and num_tokens <= room[1]:
            return old
        batch, heads, _, head_dim = keys.shape
        more_clusters = max(num_clusters // 8, 2 * self.config.clusters_per_interval)
        more_tokens = max(num_tokens // 8, 2 * self.config.recluster_interval)
        places, tokens = num_clusters + more_clusters, num_tokens + more_tokens
        new = keys.new_zeros
        index = ClusterIndex(
            new(batch, heads, places, head_dim, dtype=torch.float32),
            new(batch, heads, places + 1, dtype=torch.int32),
            torch.full((batch, heads, tokens), -1, dtype=torch.int32, device=keys.device),
        )
        if old is not None:
            end = self.num_clusters
            index.centroids[:, :, :end] = old.centroids[:, :, :end]
            index.indptr[:, :, : end + 1] = old.indptr[:, :, : end + 1]
            index.indptr[:, :, end + 1 :] = old.indptr[:, :, end : end + 1]
            index.indices[:, :, : old.indices.shape[2]] = old.indices
        self._index = index
        return index
