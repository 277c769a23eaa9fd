"""Spherical k-means over the keys of each KV head (ClusterKV, section 3.2).

Shapes: B batch, H = Hkv key-value heads, T tokens, C clusters, D head_dim. Suffixes name them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assign_clusters(keys: Tensor, centroids: Tensor, valid: Tensor | None) -> Tensor:
    """The centroid of largest cosine for each key, as int32 labels; -1 outside `valid`."""
    return _assign(keys, centroids, valid, is_absent_BC=None)


def update_centroids(keys: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """The mean of each cluster's raw keys; an empty cluster keeps its centroid."""
    num_clusters = centroids.shape[2]
    sums, counts = _sums_and_counts(keys, labels, num_clusters)
    means = (sums / counts.clamp(min=1).unsqueeze(-1)).float()
    return torch.where(counts.unsqueeze(-1) > 0, means, centroids.float())


def cluster_keys(
    keys: Tensor, initial: Tensor, valid: Tensor | None, max_iter: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Alternate assignment and update until no label changes; then sort tokens by label.

    A head whose labels stand still isn't changed by further updates, which would average the same
    keys again. So all heads can go on until the last one has converged.
    """
    is_absent_BC = initial < 0
    centroids = _keys_of(initial, keys)
    labels = torch.full(keys.shape[:3], -2, dtype=torch.int32, device=keys.device)
    for _ in range(max_iter):
        previous, labels = labels, _assign(keys, centroids, valid, is_absent_BC)
        if torch.equal(labels, previous):
            break
        centroids = update_centroids(keys, labels, centroids)
    labels = _assign(keys, centroids, valid, is_absent_BC)
    return (centroids, *_sorted_by_label(labels, centroids.shape[2]))


def extend_index_(
    centroids: Tensor,
    indptr: Tensor,
    indices: Tensor,
    keys: Tensor,
    initial: Tensor,
    valid: Tensor | None,
    first_cluster: int,
    first_token: int,
    max_iter: int,
) -> None:
    """Cluster a window among itself; write its clusters behind the first `first_cluster` ones."""
    new_centroids, new_indptr, new_indices = cluster_keys(keys, initial, valid, max_iter)
    end_cluster = first_cluster + new_centroids.shape[2]
    held = indptr[:, :, first_cluster : first_cluster + 1].clone()

    row, head, place = (new_indices >= 0).nonzero(as_tuple=True)
    tokens = new_indices[row, head, place] + first_token
    indices[row, head, held[row, head, 0] + place] = tokens
    centroids[:, :, first_cluster:end_cluster] = new_centroids
    indptr[:, :, first_cluster + 1 : end_cluster + 1] = held + new_indptr[:, :, 1:]
    indptr[:, :, end_cluster + 1 :] = held + new_indptr[:, :, -1:]


def _assign(
    keys: Tensor, centroids: Tensor, valid: Tensor | None, is_absent_BC: Tensor | None
) -> Tensor:
    """Labels; `is_absent_BC` marks clusters that a row doesn't have, which take no token.

    The norm of a key scales all its scores alike, so only the centroids are normalised.
    """
    norms = torch.linalg.vector_norm(centroids.float(), dim=-1, keepdim=True)
    directions = torch.where(norms > 0, centroids / norms, 0.0)
    scores_BHTC = keys.float() @ directions.transpose(-1, -2)
    if is_absent_BC is not None:
        scores_BHTC = scores_BHTC.masked_fill(is_absent_BC[:, None, None, :], -torch.inf)
    labels = scores_BHTC.argmax(dim=-1).to(torch.int32)  # the first, so the lower id, of equals
    if valid is None:
        return labels
    token = torch.arange(keys.shape[2], device=keys.device)
    is_valid_BT = (valid[:, :1] <= token) & (token < valid[:, 1:])
    return labels.masked_fill(~is_valid_BT[:, None, :], -1)


def _keys_of(tokens_BC: Tensor, keys: Tensor) -> Tensor:
    """`[B, H, C, D]` float32, the keys of given tokens; zeros where the token is -1."""
    row = torch.arange(keys.shape[0], device=keys.device)[:, None]
    rows_BCHD = keys[row, :, tokens_BC.clamp(min=0)].float()
    rows_BCHD = rows_BCHD.masked_fill((tokens_BC < 0)[:, :, None, None], 0.0)
    return rows_BCHD.transpose(1, 2).contiguous()


def _sums_and_counts(keys: Tensor, labels: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Sum of keys and number of tokens per cluster. A token in no cluster goes to a spare one.

    float64, because a device may add in any order: the mean rounded to float32 hides it.
    """
    is_member = (labels >= 0) & (labels < num_clusters)
    place = torch.where(is_member, labels, num_clusters).long()
    batch, heads, _, head_dim = keys.shape
    sums = keys.new_zeros((batch, heads, num_clusters + 1, head_dim), dtype=torch.float64)
    sums.scatter_add_(2, place.unsqueeze(-1).expand_as(keys), keys.double())
    counts = labels.new_zeros((batch, heads, num_clusters + 1))
    counts.scatter_add_(2, place, torch.ones_like(labels))
    return sums[:, :, :num_clusters], counts[:, :, :num_clusters]


def _sorted_by_label(labels: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Labels to compressed sparse rows: (indptr, indices), tokens ascending in each cluster."""
    place = torch.where(labels < 0, num_clusters, labels)
    counts = labels.new_zeros((*labels.shape[:2], num_clusters + 1))
    counts.scatter_add_(2, place.long(), torch.ones_like(labels))
    indptr = torch.zeros_like(counts)
    indptr[:, :, 1:] = counts[:, :, :-1].cumsum(dim=-1)
    order = torch.argsort(place, dim=-1, stable=True).to(torch.int32)
    position = torch.arange(labels.shape[2], device=labels.device)
    return indptr, order.masked_fill(position >= indptr[:, :, -1:], -1)
