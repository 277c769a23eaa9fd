"""An eager ClusterKV, written from the paper's description and sharing no state machine with ours.

It is a transformers attention function. It keeps nothing but where segments ended: clusters are
found anew in every step, row by row and without padding, from the keys that it is given. So it
needs no knowledge of crops, reordered rows or who owns the cache.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from clusterkv_ops import ClusterKVConfig, initial_tokens, reference

NAME = "clusterkv_oracle"


class Oracle:
    """Attention of a whole model under `config`; `install(model)` makes the model use it."""

    def __init__(self, config: ClusterKVConfig) -> None:
        self.config = config
        self.sparse_steps = 0
        self._ends: dict[int, list[int]] = {}
        self._known: dict[Any, list[list[int]]] = {}

    def install(self, model: torch.nn.Module) -> None:
        AttentionInterface.register(NAME, self)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.config._attn_implementation = NAME

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        _, heads, num_queries, head_dim = query.shape
        visible = self._visible(query, key, attention_mask)
        kv_len = int(visible[:, :, -1].any(1).any(0).nonzero().max()) + 1
        starts = visible[:, 0, -1].int().argmax(-1).tolist()
        layer = module.layer_idx
        ends = self._segments(layer, kv_len - num_queries)
        first = min(starts) + self.config.num_sink_tokens
        if num_queries == 1 and kv_len > 1:
            if kv_len - (ends[-1] if ends else first) > self.config.recluster_interval:
                self._close(layer, kv_len, num_queries, first)  # a crop has left much unclustered
            if layer >= self.config.dense_layers and ends:
                self._select(query, key, visible, starts, ends)
        self._close(layer, kv_len, num_queries, first)
        scale = head_dim**-0.5 if scaling is None else scaling
        group = heads // key.shape[1]
        keys, values = (x.repeat_interleave(group, 1).float() for x in (key, value))
        logits = query.float() @ keys.mT * scale
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            logits = logits + attention_mask
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        weights = weights.nan_to_num(0.0)  # rows of padding see nothing; SDPA gives 0 there too
        out = (weights @ values).to(query.dtype)
        return out.transpose(1, 2).contiguous(), None

    def _visible(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        if mask is None:  # a prompt (a static buffer may be longer), or one query that sees all
            past = 0 if query.shape[2] > 1 else key.shape[2] - 1
            causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(past)
            return causal.expand(shape).clone()
        seen = mask if mask.dtype == torch.bool else mask > -1e4
        return seen[..., : key.shape[2]].expand(shape).clone()

    def _segments(self, layer: int, past: int) -> list[int]:
        """Where this layer's segments end that lie within the past."""
        ends = [end for end in self._ends.get(layer, []) if end <= past]
        self._ends[layer] = ends
        return ends

    def _close(self, layer: int, kv_len: int, num_queries: int, first: int) -> None:
        """End a segment here, if enough tokens wait to be clustered."""
        config, ends = self.config, self._ends[layer]
        is_prompt = kv_len == num_queries
        recent = kv_len - (ends[-1] if ends else first)
        enough = config.tokens_per_cluster if is_prompt else config.recluster_interval
        if kv_len > config.budget and recent >= enough:
            ends.append(kv_len)

    def _select(
        self, query: Tensor, key: Tensor, visible: Tensor, starts: list[int], ends: list[int]
    ) -> None:
        """Hide the clustered tokens that are not selected."""
        config = self.config
        sinks = [start + config.num_sink_tokens for start in starts]
        room = config.budget - config.num_sink_tokens
        if ends[-1] - min(sinks) <= room:
            return
        self.sparse_steps += 1
        group = query.shape[1] // key.shape[1]
        for row, first in enumerate(sinks):
            for kv_head in range(key.shape[1]):
                keys = key[row, kv_head].float()
                clusters = self._clusters(keys, first, ends)
                heads = query[row, kv_head * group : (kv_head + 1) * group, 0].float()
                for head, chosen in enumerate(self._choices(heads, keys, clusters, room)):
                    hidden = torch.zeros(key.shape[2], dtype=torch.bool)
                    hidden[first : max(first, ends[-1])] = True
                    hidden[chosen] = False
                    visible[row, kv_head * group + head, 0, hidden] = False

    def _choices(
        self, heads: Tensor, keys: Tensor, clusters: list[list[int]], room: int
    ) -> list[list[int]]:
        """The tokens that each query head of a group attends to."""
        centroids = torch.stack([keys[tokens].mean(0) for tokens in clusters])
        scores = heads @ centroids.T
        if self.config.head_rule == "kv_head":
            sizes = torch.tensor([float(len(tokens)) for tokens in clusters])
            mass = (scores * heads.shape[-1] ** -0.5 + sizes.log()).softmax(-1).sum(0) / sizes
            scores = mass.expand(len(heads), -1)
        orders = torch.argsort(scores, dim=-1, descending=True, stable=True).tolist()
        return [[t for c in order for t in clusters[c]][:room] for order in orders]

    def _clusters(self, keys: Tensor, first: int, ends: list[int]) -> list[list[int]]:
        """Tokens of every cluster of one KV head."""
        clusters, begin = [], 0
        for end in ends:
            low = max(begin, first)
            if low < end:
                stretch = keys[low:end]
                seen = (low, end, begin == 0, stretch.numpy().tobytes())
                if seen not in self._known:
                    self._known[seen] = self._cluster(stretch, is_prompt=begin == 0)
                clusters += [[low + t for t in tokens] for tokens in self._known[seen]]
            begin = end
        return clusters

    def _cluster(self, keys: Tensor, *, is_prompt: bool) -> list[list[int]]:
        config, num_tokens = self.config, len(keys)
        if is_prompt:
            num_clusters = max(1, num_tokens // config.tokens_per_cluster)
        else:
            share = num_tokens * config.clusters_per_interval / config.recluster_interval
            num_clusters = max(1, min(num_tokens, round(share)))
        valid = torch.tensor([[0, num_tokens]], dtype=torch.int32)
        initial = initial_tokens(valid, num_clusters, kv_len=num_tokens, seed=config.seed)
        _, indptr, indices = reference.cluster_keys(
            keys[None, None], initial, None, config.max_iter
        )
        bounds, tokens = indptr[0, 0].tolist(), indices[0, 0].tolist()
        found = [tokens[a:b] for a, b in pairwise(bounds)]
        return [cluster for cluster in found if cluster]
