"""Inputs of the operator tests, and the tolerance they are compared with.

Shapes: B batch, Hkv / Hq key-value / query heads, T tokens, C clusters, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clusterkv_ops import ClusterIndex

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUP_SIZES = [1, 3, 4, 7, 8]
HEAD_DIMS = [33, 64, 80, 96, 128, 256]


class Shape(NamedTuple):
    """Sizes of one case: batch, KV heads, query heads per KV head, tokens, clusters, head_dim."""

    batch: int = 2
    heads: int = 2
    group: int = 3
    kv_len: int = 150
    clusters: int = 9
    head_dim: int = 64

    def __str__(self) -> str:
        return "-".join(str(size) for size in self)


SHAPES = [
    Shape(),
    Shape(kv_len=1, clusters=1),
    Shape(batch=1, kv_len=40, clusters=40),
    Shape(batch=1, heads=1, group=1, kv_len=700, clusters=50),
    *(Shape(group=group, kv_len=90) for group in GROUP_SIZES if group != 3),
    *(Shape(head_dim=head_dim, kv_len=120) for head_dim in HEAD_DIMS if head_dim != 64),
]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*shape, generator=generator(seed)).to(device=device, dtype=dtype)


def token_major(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, Hkv, T, D]` as views of one buffer [T, B, Hkv, 2, D], as stored."""
    size = (shape.kv_len, shape.batch, shape.heads, 2, shape.head_dim)
    buffer = random(*size, dtype=dtype, device=device, seed=seed)
    keys, values = buffer.permute(3, 1, 2, 0, 4)
    return keys, values


def query_for(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 1) -> Tensor:
    """A query `[B, Hq, 1, D]` as a projection leaves it: a view of [B, 1, Hq, D]."""
    size = (shape.batch, 1, shape.heads * shape.group, shape.head_dim)
    return random(*size, dtype=dtype, device=device, seed=seed).transpose(1, 2)


def sampled_tokens(batch: int, kv_len: int, clusters: int, device: torch.device) -> Tensor:
    """Initial tokens `[B, C]`, other ones in each row."""
    rows = [torch.randperm(kv_len, generator=generator(row))[:clusters] for row in range(batch)]
    return torch.stack(rows).to(device=device, dtype=torch.int32)


def index_of(labels: Tensor, centroids: Tensor, capacity: int | None = None) -> ClusterIndex:
    """The compressed sparse rows of labels `[B, Hkv, T]`, made token by token in plain Python."""
    batch, heads, kv_len = labels.shape
    num_clusters = centroids.shape[2]
    indptr = torch.zeros(batch, heads, num_clusters + 1, dtype=torch.int32)
    indices = torch.full((batch, heads, capacity or kv_len), -1, dtype=torch.int32)
    for row in range(batch):
        for head in range(heads):
            members: list[list[int]] = [[] for _ in range(num_clusters)]
            for token, label in enumerate(labels[row, head].tolist()):
                if label >= 0:
                    members[label].append(token)
            tokens = [token for cluster in members for token in cluster]
            sizes = torch.tensor([len(cluster) for cluster in members])
            indptr[row, head, 1:] = sizes.cumsum(0)
            indices[row, head, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    device = centroids.device
    return ClusterIndex(centroids, indptr.to(device), indices.to(device))


def random_index(shape: Shape, device: torch.device, seed: int = 2) -> ClusterIndex:
    """An index with random clusters, about one in five of them empty, and unclustered tokens."""
    size = (shape.batch, shape.heads, shape.kv_len)
    labels = torch.randint(-1, shape.clusters, size, generator=generator(seed))
    labels = torch.where(labels % 5 == 3, labels - 1, labels)
    centroids = random(
        *(shape.batch, shape.heads, shape.clusters, shape.head_dim),
        dtype=torch.float32,
        device=device,
        seed=seed,
    )
    return index_of(labels, centroids, capacity=shape.kv_len + 7)


def random_selection(
    shape: Shape, heads: int, selected: int, device: torch.device, first: int = 0
) -> Tensor:
    """`[B, heads, S]` int32: distinct tokens from `first` on, the last third of them -1."""
    tokens = torch.full((shape.batch, heads, selected), -1, dtype=torch.int32)
    for row in range(shape.batch):
        for head in range(heads):
            order = torch.randperm(shape.kv_len - first, generator=generator(row * 100 + head))
            taken = order[: max(selected - selected // 3, 0)] + first
            tokens[row, head, : len(taken)] = taken
    return tokens.to(device)


def assert_as_good_as(
    actual: Tensor, independent: Tensor, exact: Tensor, addends: Tensor | None = None
) -> None:
    """`actual` is at most twice as far from the float64 result as an independent run in its dtype.

    Where that run happens to be nearly exact, one rounding of the largest result counts as its
    error, and one rounding in float32 of the largest of the `addends` that the result sums up.
    """
    assert actual.shape == exact.shape
    rounding = torch.finfo(independent.dtype).eps * exact.abs().max()
    if addends is not None:
        rounding += torch.finfo(torch.float32).eps * addends.double().abs().max()
    allowed = 2 * torch.maximum((independent.double() - exact).abs().max(), rounding)
    error = (actual.double() - exact).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
