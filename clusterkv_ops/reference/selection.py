"""Ranking of clusters and expansion into tokens, up to the budget (ClusterKV, section 3.3).

Shapes: B batch, H = Hkv key-value heads, G query heads per KV head, C clusters, D head_dim,
R = G rankings per KV head ("query_head") or 1 ("kv_head"). Suffixes name them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select_clusters(
    query: Tensor,
    centroids: Tensor,
    indptr: Tensor,
    indices: Tensor,
    budget: int,
    head_rule: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Tokens of the best clusters, best first, the last cluster trimmed; how many there are."""
    batch, num_kv_heads, _, head_dim = centroids.shape
    query_BHGD = query.float().reshape(batch, num_kv_heads, -1, head_dim)
    scores_BHGC = query_BHGD @ centroids.float().transpose(-1, -2)
    sizes_BH1C = indptr.diff(dim=-1).unsqueeze(2)
    if head_rule == "query_head":
        rank_BHRC = scores_BHGC
    elif head_rule == "kv_head":
        rank_BHRC = _mass_per_token(scores_BHGC, sizes_BH1C, scale)
    else:
        raise ValueError(f"head_rule: expected query_head or kv_head, got {head_rule!r}")
    rank_BHRC = rank_BHRC.masked_fill(sizes_BH1C == 0, -torch.inf)
    order_BHRC = torch.argsort(rank_BHRC, dim=-1, descending=True, stable=True)
    return _first_tokens(order_BHRC, indptr, indices, budget)


def _mass_per_token(scores_BHGC: Tensor, sizes_BH1C: Tensor, scale: float) -> Tensor:
    """`[B, H, 1, C]`: attention that a token of each cluster gets from the group, if every token
    had its centroid's key."""
    mass_BHGC = torch.softmax(scale * scores_BHGC + sizes_BH1C.log(), dim=-1)
    return mass_BHGC.sum(dim=2, keepdim=True) / sizes_BH1C


def _first_tokens(
    order_BHRC: Tensor, indptr: Tensor, indices: Tensor, budget: int
) -> tuple[Tensor, Tensor]:
    """Walk the clusters in order and list their tokens until the budget is reached."""
    batch, num_kv_heads, rankings, _ = order_BHRC.shape
    begins_BHRC = indptr[:, :, None, :-1].expand_as(order_BHRC).gather(-1, order_BHRC)
    sizes_BHRC = indptr.diff(dim=-1).unsqueeze(2).expand_as(order_BHRC).gather(-1, order_BHRC)
    ends_BHRC = sizes_BHRC.cumsum(dim=-1)  # of the clusters in the output

    place = torch.arange(budget, device=indptr.device).expand(*order_BHRC.shape[:3], budget)
    which = torch.searchsorted(ends_BHRC, place.contiguous(), right=True)
    is_filled = which < order_BHRC.shape[-1]
    which = which.masked_fill(~is_filled, 0)
    begin_in_output = (ends_BHRC - sizes_BHRC).gather(-1, which)
    source = begins_BHRC.gather(-1, which) + place - begin_in_output
    source = source.masked_fill(~is_filled, 0).flatten(2)
    tokens = indices.gather(-1, source).view_as(place).masked_fill(~is_filled, -1)
    num_selected = is_filled.sum(dim=-1, dtype=torch.int32)
    heads = num_kv_heads * rankings
    return tokens.reshape(batch, heads, budget), num_selected.reshape(batch, heads)
