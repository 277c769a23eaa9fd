"""Clustering: keys to a `ClusterIndex`, once after the prompt, then window by window.

    keys [B,Hkv,T,D] --> centroids [B,Hkv,C,D], indptr [B,Hkv,C+1], indices [B,Hkv,T]

B batch, Hkv key-value heads, T cached tokens, C clusters, W tokens of a window, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clusterkv_ops import schemas as _schemas  # noqa: F401  (defines the operators)
from clusterkv_ops.types import ClusterIndex
from clusterkv_ops.validation import (
    check_at_least,
    check_device,
    check_finite_keys,
    check_index,
    check_keys,
    check_positions,
    check_shape,
    check_tensor,
    check_valid,
    error,
)

_32_BITS = 0xFFFFFFFF
_OFF_ZERO = 0x9E3779B9  # `_mixed` leaves 0 alone, so offset 0 of seed 0 would always come first


def cluster_keys(
    keys: Tensor,
    *,
    num_clusters: int | Tensor,
    max_iter: int = 20,
    seed: int = 0,
    valid: Tensor | None = None,
) -> ClusterIndex:
    """Group the keys of each KV head by direction (spherical k-means).

    Each token joins the centroid of largest cosine, ties to the lower cluster; each centroid
    becomes the mean of its tokens' raw keys. A head stops when no label changes, or after
    `max_iter` updates; labels always belong to the returned centroids. An empty cluster keeps its
    centroid. A row with fewer tokens than clusters gets one cluster a token, and the rest of its
    clusters stay empty with a zero centroid. A row's result doesn't depend on its neighbours.

    Args:
        keys: ``[B, Hkv, T, D]`` float32, bfloat16 or float16, after rotary embedding; any
            strides of B, Hkv and T.
        num_clusters: clusters of each row, at most T; an int, or ``[B]`` int32 or int64 for rows
            of different lengths (C is then the largest of them).
        max_iter: most updates, at least 1.
        seed: of the initial centroids, see `initial_tokens`.
        valid: ``[B, 2]`` int32, begin and end of each row's tokens to cluster; all by default.

    Returns:
        ClusterIndex: token positions are places on the T axis of `keys`.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a shape, dtype or range is wrong, or a key to be clustered isn't finite.

    Note:
        Deterministic for a seed, whatever the number of threads. Not differentiable. Cost:
        `T * C * D` multiply-adds a head and iteration. `num_clusters` as a tensor is read on the
        host, so under ``torch.compile(fullgraph=True)`` it must be an int; contents are checked in
        eager mode only.

    Source:
        ClusterKV (arXiv:2412.03213), section 3.2. The paper doesn't say how ties and empty
        clusters are treated: as above.

    Example:
        >>> keys = torch.randn(1, 2, 1000, 64, generator=torch.Generator().manual_seed(0))
        >>> index = cluster_keys(keys, num_clusters=12)
        >>> index.centroids.shape, index.indptr.shape, index.indices.shape
        (torch.Size([1, 2, 12, 64]), torch.Size([1, 2, 13]), torch.Size([1, 2, 1000]))
        >>> index.indptr[0, 0, [0, -1]].tolist()
        [0, 1000]
    """
    check_keys("keys", keys)
    check_at_least("max_iter", max_iter, 1)
    if valid is not None:
        check_valid(valid, keys)
    check_finite_keys(keys, valid)
    initial = _initial_tokens_of(keys, num_clusters, seed, valid)
    return ClusterIndex(*torch.ops.clusterkv.cluster_keys(keys, initial, valid, max_iter))


@torch.library.register_fake("clusterkv::cluster_keys")
def _(
    keys: Tensor, initial: Tensor, valid: Tensor | None, max_iter: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_len, head_dim = keys.shape
    num_clusters = initial.shape[1]
    centroids = keys.new_empty((batch, heads, num_clusters, head_dim), dtype=torch.float32)
    indptr = keys.new_empty((batch, heads, num_clusters + 1), dtype=torch.int32)
    return centroids, indptr, keys.new_empty((batch, heads, kv_len), dtype=torch.int32)


def extend_index(
    index: ClusterIndex,
    keys: Tensor,
    *,
    num_clusters: int | Tensor,
    first_token: int,
    max_iter: int = 20,
    seed: int = 0,
    valid: Tensor | None = None,
) -> ClusterIndex:
    """Cluster a window of new tokens among itself and append its clusters to an index.

    The clusters already there, and their tokens, stay what they were. The operator below works in
    place on an index with room to spare, as the runtime does; this function returns a new index.

    Args:
        index: what was clustered so far, C clusters.
        keys: ``[B, Hkv, W, D]``, the window's keys only.
        num_clusters: new clusters, at most W, as in `cluster_keys`.
        first_token: position of the window's first token in the sequence, at least 0.
        max_iter, seed: as in `cluster_keys`.
        valid: ``[B, 2]`` int32, begin and end of each row's tokens within the window.

    Returns:
        ClusterIndex: of C + `num_clusters` clusters; its `indices` are W longer.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a shape, dtype or range is wrong, or a key to be clustered isn't finite.

    Note:
        Deterministic for a seed. Not differentiable. Copies the index, which is small beside the
        keys.

    Source:
        ClusterKV (arXiv:2412.03213), section 3.2: every 320 generated tokens make 4 clusters.

    Example:
        >>> keys = torch.randn(1, 2, 1320, 64, generator=torch.Generator().manual_seed(0))
        >>> index = cluster_keys(keys[:, :, :1000], num_clusters=12)
        >>> index = extend_index(index, keys[:, :, 1000:], num_clusters=4, first_token=1000)
        >>> index.centroids.shape, index.indptr[0, 0, [12, 16]].tolist()
        (torch.Size([1, 2, 16, 64]), [1000, 1320])
    """
    check_keys("keys", keys)
    check_index(index, keys.shape[0], keys.shape[1], keys.shape[3])
    check_device("keys", keys, "index.centroids", index.centroids)
    check_at_least("max_iter", max_iter, 1)
    check_at_least("first_token", first_token, 0)
    if valid is not None:
        check_valid(valid, keys)
    check_finite_keys(keys, valid)
    initial = _initial_tokens_of(keys, num_clusters, seed, valid)

    batch, heads, window, head_dim = keys.shape
    first_cluster, new_clusters = index.centroids.shape[2], initial.shape[1]
    new_centroids = index.centroids.new_zeros((batch, heads, new_clusters, head_dim))
    centroids = torch.cat([index.centroids, new_centroids], dim=2)
    new_indptr = index.indptr.new_zeros((batch, heads, new_clusters))
    indptr = torch.cat([index.indptr, new_indptr], dim=2)
    indices = torch.cat([index.indices, index.indices.new_full((batch, heads, window), -1)], dim=2)
    torch.ops.clusterkv.extend_index_(
        centroids, indptr, indices, keys, initial, valid, first_cluster, first_token, max_iter
    )
    return ClusterIndex(centroids, indptr, indices)


@torch.library.register_fake("clusterkv::extend_index_")
def _(
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
    return None


def initial_tokens(
    valid: Tensor,
    num_clusters: int | Tensor,
    *,
    kv_len: int,
    max_clusters: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Tokens whose keys are the first centroids: a random sample without replacement.

    The sample of a row depends only on the length of its range, its number of clusters and the
    seed, so that a padded row gets the same tokens as an unpadded one. The heads share it.

    Args:
        valid: ``[B, 2]`` int32, begin and end of the tokens of each row.
        num_clusters: an int, or an integer tensor ``[B]``.
        kv_len: T, length of the token axis that `valid` points into.
        max_clusters: width C of the result; by default the largest of `num_clusters`, which waits
            for the device where that is a tensor on one.
        seed: at least 0; only its lower 32 bits matter.

    Returns:
        Tensor: ``[B, C]`` int32, token positions, -1 where a row has fewer clusters than C.

    Raises:
        RuntimeError: C is larger than `kv_len`.

    Note:
        Sorts tokens by a bijective hash of their offset in the row and takes the first C: integer
        arithmetic alone, so every device and every compiler gives the same sample.

    Source:
        ClusterKV (arXiv:2412.03213), section 3.2 samples at random; the generator is ours.

    Example:
        >>> initial_tokens(torch.tensor([[0, 9], [4, 6]], dtype=torch.int32), 3, kv_len=9)
        tensor([[ 8,  5,  4],
                [ 5,  4, -1]], dtype=torch.int32)
    """
    if max_clusters is None:
        max_clusters = num_clusters if isinstance(num_clusters, int) else int(num_clusters.max())
    begin, end = valid[:, :1].long(), valid[:, 1:].long()
    token = torch.arange(kv_len, device=valid.device)
    is_valid = (begin <= token) & (token < end)
    hashes = _mixed(_mixed(token - begin) + seed % (_32_BITS + 1) + _OFF_ZERO)
    hashes = torch.where(is_valid, hashes, _32_BITS + 1)
    tokens = torch.topk(hashes, max_clusters, dim=1, largest=False, sorted=True).indices
    if isinstance(num_clusters, Tensor):
        num_clusters = num_clusters.to(valid.device).unsqueeze(-1)
    rank = torch.arange(max_clusters, device=valid.device)
    is_sampled = (rank < end - begin) & (rank < num_clusters)
    return torch.where(is_sampled, tokens, -1).to(torch.int32)


def assign_clusters(keys: Tensor, centroids: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """The cluster of each key: the centroid of largest cosine, ties to the lower cluster.

    A centroid of norm zero has the cosine 0 with every key.

    Args:
        keys: ``[B, Hkv, T, D]`` float32, bfloat16 or float16; any strides of B, Hkv and T.
        centroids: ``[B, Hkv, C, D]`` float32.
        valid: ``[B, 2]`` int32, begin and end of the tokens of each row to assign.

    Returns:
        Tensor: labels ``[B, Hkv, T]`` int32, -1 outside `valid`.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a shape, dtype or range is wrong, or a key to be assigned isn't finite.

    Note:
        Deterministic. Not differentiable. Cost: `T * C * D` multiply-adds a head, in float32.

    Source:
        ClusterKV (arXiv:2412.03213), section 3.2: distance 1 - cos(k_i, k_j).

    Example:
        >>> keys = torch.tensor([[3.0, 0.0], [0.0, 1.0], [2.0, 1.0]]).view(1, 1, 3, 2)
        >>> assign_clusters(keys, keys[:, :, :2])
        tensor([[[0, 1, 0]]], dtype=torch.int32)
    """
    check_keys("keys", keys)
    _check_centroids(centroids, keys)
    if valid is not None:
        check_valid(valid, keys)
    check_finite_keys(keys, valid)
    labels: Tensor = torch.ops.clusterkv.assign_clusters(keys, centroids, valid)
    return labels


@torch.library.register_fake("clusterkv::assign_clusters")
def _(keys: Tensor, centroids: Tensor, valid: Tensor | None) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=torch.int32)


def update_centroids(keys: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """The mean of the raw keys of each cluster, in float32.

    Args:
        keys: ``[B, Hkv, T, D]`` float32, bfloat16 or float16; any strides of B, Hkv and T.
        labels: ``[B, Hkv, T]`` int32, the cluster of each token; -1 for none.
        centroids: ``[B, Hkv, C, D]`` float32; an empty cluster keeps its row of it.

    Returns:
        Tensor: ``[B, Hkv, C, D]`` float32.

    Raises:
        TypeError: an argument isn't a tensor.
        ValueError: a shape, dtype or label is wrong.

    Note:
        Deterministic: sums are taken in a fixed order. Not differentiable.

    Source:
        ClusterKV (arXiv:2412.03213), sections 3.2 and 4.1.

    Example:
        >>> keys = torch.tensor([[3.0, 0.0], [0.0, 1.0], [2.0, 1.0]]).view(1, 1, 3, 2)
        >>> labels = torch.tensor([[[0, 1, 0]]], dtype=torch.int32)
        >>> update_centroids(keys, labels, keys[:, :, :2]).tolist()
        [[[[2.5, 0.5], [0.0, 1.0]]]]
    """
    check_keys("keys", keys)
    _check_centroids(centroids, keys)
    check_tensor("labels", labels, torch.int32)
    check_shape("labels", labels, *keys.shape[:3])
    check_device("labels", labels, "keys", keys)
    check_positions("labels", labels, centroids.shape[2])
    means: Tensor = torch.ops.clusterkv.update_centroids(keys, labels, centroids)
    return means


@torch.library.register_fake("clusterkv::update_centroids")
def _(keys: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    return torch.empty_like(centroids, memory_format=torch.contiguous_format)


def _initial_tokens_of(
    keys: Tensor, num_clusters: int | Tensor, seed: int, valid: Tensor | None
) -> Tensor:
    """`initial_tokens` of the rows of `keys`, with its arguments checked."""
    batch, _, kv_len, _ = keys.shape
    check_at_least("seed", seed, 0)
    if isinstance(num_clusters, Tensor):
        check_tensor("num_clusters", num_clusters, torch.int32, torch.int64, has_any_strides=True)
        check_shape("num_clusters", num_clusters, batch)
        low, high = (int(bound) for bound in num_clusters.aminmax())
    else:
        low = high = num_clusters
    check_at_least("num_clusters", low, 1)
    if high > kv_len:
        raise error("num_clusters", f"at most the {kv_len} tokens of keys", high)
    if valid is None:
        begin = torch.zeros(batch, dtype=torch.int32, device=keys.device)
        valid = torch.stack([begin, torch.full_like(begin, kv_len)], dim=1)
    return initial_tokens(valid, num_clusters, kv_len=kv_len, max_clusters=high, seed=seed)


def _mixed(numbers: Tensor) -> Tensor:
    """A bijection of the 32-bit integers that scatters neighbours. Products stay below 2**63."""
    numbers = numbers & _32_BITS
    for _ in range(2):
        numbers = ((numbers ^ (numbers >> 16)) * 0x45D9F3B) & _32_BITS
    return numbers ^ (numbers >> 16)


def _check_centroids(centroids: Tensor, keys: Tensor) -> None:
    batch, heads, _, head_dim = keys.shape
    check_tensor("centroids", centroids, torch.float32)
    check_shape("centroids", centroids, batch, heads, "C", head_dim)
    if centroids.shape[2] < 1:
        raise error("centroids", "at least one cluster", list(centroids.shape))
    check_device("centroids", centroids, "keys", keys)
