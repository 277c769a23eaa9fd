"""Exact attention for the calls that ClusterKV leaves dense, and what their masks say.

Shapes: B batch, Hq / Hkv heads, G = Hq / Hkv, n queries, T tokens, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Folding pays while the group's queries are few; above, SDPA has enough rows of its own.
_MOST_FOLDED_QUERIES = 64
_HIDDEN = -1e4  # an additive mask at or below this hides a token: exp(-1e4) is 0 in float32


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """`scaled_dot_product_attention` with grouped heads, as fast as its caller could have it.

    Few queries that all see the same tokens are folded: the query heads of a group become rows of
    one attention over their KV head, which reads K and V once instead of G times.
    """
    batch, num_qo_heads, num_queries, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_qo_heads // num_kv_heads
    is_shared = mask is None or mask.shape[1] == 1
    if is_causal or group == 1 or group * num_queries > _MOST_FOLDED_QUERIES or not is_shared:
        return scaled_dot_product_attention(
            query, keys, values, mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1
        )
    folded = query.reshape(batch, num_kv_heads, group * num_queries, head_dim)
    if mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    return out.reshape(batch, num_qo_heads, num_queries, head_dim)


def first_visible_tokens(mask: Tensor, kv_len: int, batch: int) -> list[int] | None:
    """The first token that the last query of each row sees, from a mask `[B|1, Hq|1, n, T]`.

    None where the visible tokens are not one stretch that ends at `kv_len`.
    """
    visible = _visible(mask[:, :, -1]).expand(batch, -1)[:, :kv_len]
    first = visible.int().argmax(-1)
    count = visible.sum(-1)
    is_one_stretch = (count > 0) & (first + count == kv_len)
    return first.tolist() if bool(is_one_stretch.all()) else None


def is_windowed(mask: Tensor, starts: list[int], kv_len: int) -> bool:
    """Whether a query in the middle of a prompt sees tokens before `starts`, the last query's."""
    middle = (max(starts) + kv_len) // 2
    if mask.shape[2] <= middle:
        return False
    visible = _visible(mask[:, :, middle]).expand(len(starts), -1)
    first: list[int] = visible.int().argmax(-1).tolist()
    return any(a < b for a, b in zip(first, starts, strict=True))


def _visible(rows: Tensor) -> Tensor:
    """`[B, T]`: which tokens any head of the mask's rows `[B, H, T]` sees."""
    return rows.any(1) if rows.dtype == torch.bool else rows.amax(1) > _HIDDEN
