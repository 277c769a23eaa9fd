"""Selection: a query and the index to the tokens worth attending to, up to the budget.

    query [B,Hq,1,D], ClusterIndex --> indices [B,Hs,S], num_selected [B,Hs]

B batch, Hq / Hkv query / key-value heads, C clusters, S = budget, D head_dim; Hs is Hq or Hkv, as
the head rule says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clusterkv_ops import schemas as _schemas  # noqa: F401  (defines the operators)
from clusterkv_ops.types import ClusterIndex, TokenSelection
from clusterkv_ops.validation import (
    HEAD_RULES,
    check_at_least,
    check_device,
    check_index,
    check_query,
    error,
)


def select_clusters(
    query: Tensor,
    index: ClusterIndex,
    *,
    budget: int,
    head_rule: str = "query_head",
    scale: float | None = None,
) -> TokenSelection:
    """Rank the clusters for a query and take the tokens of the best ones.

    Whole clusters are taken in the order of their rank (ties: the lower cluster first) until
    `budget` tokens are reached; of the last one only its first tokens are taken. Empty clusters
    are never selected. Where fewer than `budget` tokens are clustered, all of them are selected.

    * ``"query_head"``: each query head has its own budget and ranks by ``q . centroid``, the inner
      product and not the cosine.
    * ``"kv_head"``: one choice for the query heads that share a KV head. With p_g the softmax over
      non-empty clusters of ``scale * (q_g . centroid) + log(size)``, a cluster's rank is the sum
      of ``p_g / size`` over the group: the attention that one of its tokens gets.

    Args:
        query: ``[B, Hq, 1, D]`` float32, bfloat16 or float16; Hq a multiple of Hkv.
        index: of C clusters over Hkv heads; places behind its last token are ignored.
        budget: tokens to select, at least 1.
        head_rule: ``"query_head"`` or ``"kv_head"``.
        scale: of the logits, ``1 / sqrt(D)`` by default; "query_head" doesn't need it.

    Returns:
        TokenSelection: ``indices [B, Hs, budget]`` and ``num_selected [B, Hs]``, int32.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a shape, dtype or setting is wrong, or the index contradicts itself.

    Note:
        Deterministic. Not differentiable. No host synchronisation inside the operator; contents of
        the index are checked in eager mode only. Cost: `C * D` multiply-adds a query head.

    Source:
        ClusterKV (arXiv:2412.03213), section 3.3. "kv_head" is ours: it fetches and reads each
        token once for the group.

    Example:
        >>> centroids = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]).view(1, 1, 3, 2)
        >>> indptr = torch.tensor([[[0, 2, 5, 6]]], dtype=torch.int32)
        >>> indices = torch.tensor([[[1, 4, 0, 2, 5, 3]]], dtype=torch.int32)
        >>> query = torch.tensor([2.0, 3.0]).view(1, 1, 1, 2)
        >>> select_clusters(query, ClusterIndex(centroids, indptr, indices), budget=4)
        TokenSelection(indices=tensor([[[0, 2, 5, 1]]], dtype=torch.int32), num_selected=tensor([[4]], dtype=torch.int32))
    """  # noqa: E501  (a printed result)
    check_index(index)
    batch, num_kv_heads, _, head_dim = index.centroids.shape
    check_query(query, num_kv_heads, batch, head_dim)
    check_device("query", query, "index.centroids", index.centroids)
    check_at_least("budget", budget, 1)
    if head_rule not in HEAD_RULES:
        raise error("head_rule", " or ".join(HEAD_RULES), repr(head_rule))
    if scale is None:
        scale = head_dim**-0.5
    return TokenSelection(
        *torch.ops.clusterkv.select_clusters(query, *index, budget, head_rule, scale)
    )


@torch.library.register_fake("clusterkv::select_clusters")
def _(
    query: Tensor,
    centroids: Tensor,
    indptr: Tensor,
    indices: Tensor,
    budget: int,
    head_rule: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch = query.shape[0]
    heads = centroids.shape[1] if head_rule == "kv_head" else query.shape[1]
    tokens = query.new_empty((batch, heads, budget), dtype=torch.int32)
    return tokens, query.new_empty((batch, heads), dtype=torch.int32)
