"""Clustering: the k-means steps, the loop, and the index that they leave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clusterkv_ops import (
    ClusterIndex,
    assign_clusters,
    cluster_keys,
    reference,
    update_centroids,
)
from tests.ops.inputs import (
    DTYPES,
    SHAPES,
    Shape,
    assert_as_good_as,
    index_of,
    random,
    sampled_tokens,
    token_major,
)

ops = torch.ops.clusterkv


def cosines(keys: Tensor, centroids: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, H, T, C]`: k . c / |c|."""
    directions = torch.nn.functional.normalize(centroids.to(dtype), dim=-1, eps=1e-30)
    return keys.to(dtype) @ directions.transpose(-1, -2)


def assert_best(labels: Tensor, keys: Tensor, centroids: Tensor) -> None:
    """Each label has the largest cosine, up to twice the rounding of a float32 run."""
    assert labels.dtype == torch.int32
    exact = cosines(keys, centroids, torch.float64)
    error = (cosines(keys, centroids, torch.float32).double() - exact).abs().max()
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    chosen = exact.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
    assert (exact.amax(dim=-1) - chosen).max() <= 2 * torch.maximum(error, rounding)


def means(keys: Tensor, labels: Tensor, centroids: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, H, C, D]`: the mean of each cluster, as a matrix product with its members."""
    cluster = torch.arange(centroids.shape[2], device=keys.device)
    is_member = (labels.unsqueeze(2) == cluster.unsqueeze(-1)).to(dtype)
    counts = is_member.sum(dim=-1, keepdim=True)
    return torch.where(counts > 0, is_member @ keys.to(dtype) / counts, centroids.to(dtype))


def labels_of(index: ClusterIndex, kv_len: int) -> Tensor:
    """`[B, H, T]` labels from the rows of an index; also checks that the rows are well formed."""
    assert index.indptr.dtype == index.indices.dtype == torch.int32
    assert index.centroids.dtype == torch.float32
    batch, heads, num_clusters, _ = index.centroids.shape
    labels = torch.full((batch, heads, kv_len), -1, dtype=torch.int32)
    for row in range(batch):
        for head in range(heads):
            indptr = index.indptr[row, head].tolist()
            indices = index.indices[row, head].tolist()
            assert indptr[0] == 0
            assert set(indices[indptr[-1] :]) <= {-1}
            assert len(set(indices[: indptr[-1]])) == indptr[-1]
            for cluster in range(num_clusters):
                tokens = indices[indptr[cluster] : indptr[cluster + 1]]
                assert tokens == sorted(tokens)
                labels[row, head, tokens] = cluster
    return labels.to(index.indptr.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_assignment_matches_the_oracle(
    device: torch.device, dtype: torch.dtype, shape: Shape
) -> None:
    keys, _ = token_major(shape, dtype, device)
    size = (shape.batch, shape.heads, shape.clusters, shape.head_dim)
    centroids = random(*size, dtype=torch.float32, device=device, seed=3)
    labels = ops.assign_clusters(keys, centroids, None)
    assert_best(labels, keys, centroids)
    assert_best(reference.assign_clusters(keys, centroids, None), keys, centroids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_update_matches_the_oracle(device: torch.device, dtype: torch.dtype, shape: Shape) -> None:
    keys, _ = token_major(shape, dtype, device)
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.heads, shape.kv_len)
    labels = torch.randint(-1, shape.clusters, size, generator=generator, dtype=torch.int32)
    labels = labels.to(device)
    before = random(*size[:2], shape.clusters, shape.head_dim, dtype=torch.float32, device=device)
    actual = ops.update_centroids(keys, labels, before)
    exact = means(keys, labels, before, torch.float64)
    low = means(keys, labels, before, torch.float32)
    assert actual.dtype == torch.float32
    assert_as_good_as(actual, low, exact)
    assert_as_good_as(reference.update_centroids(keys, labels, before), low, exact)
    is_kept = exact == before
    assert torch.equal(actual[is_kept], before[is_kept])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_iteration_matches_the_oracle(
    device: torch.device, dtype: torch.dtype, shape: Shape
) -> None:
    """Replayed one iteration at a time, because a tie within rounding may go either way."""
    keys, _ = token_major(shape, dtype, device)
    initial = sampled_tokens(shape.batch, shape.kv_len, shape.clusters, device)
    first = torch.stack([keys[row, :, initial[row].long()].float() for row in range(shape.batch)])
    labels = ops.assign_clusters(keys, first, None)
    centroids = first
    for max_iter in range(1, 5):
        exact = means(keys, labels, centroids, torch.float64)
        low = means(keys, labels, centroids, torch.float32)
        index = ClusterIndex(*ops.cluster_keys(keys, initial, None, max_iter))
        assert_as_good_as(index.centroids, low, exact)
        labels, centroids = labels_of(index, shape.kv_len), index.centroids
        assert_best(labels, keys, centroids)


def test_equal_cosines_go_to_the_lower_cluster(device: torch.device) -> None:
    shape = Shape(kv_len=300, clusters=70, head_dim=32)
    keys = random(2, 2, 300, 32, dtype=torch.float32, device=device)
    half = random(2, 2, 35, 32, dtype=torch.float32, device=device, seed=3)
    centroids = torch.cat([half, 2 * half], dim=2)
    assert shape.clusters == centroids.shape[2]
    labels = ops.assign_clusters(keys, centroids, None)
    assert torch.equal(labels, ops.assign_clusters(keys, half, None))


def test_the_norm_of_keys_and_centroids_does_not_matter(device: torch.device) -> None:
    keys = random(1, 2, 200, 64, dtype=torch.float32, device=device)
    centroids = random(1, 2, 12, 64, dtype=torch.float32, device=device, seed=3)
    labels = ops.assign_clusters(keys, centroids, None)
    powers = 2.0 ** torch.arange(-3, 9, device=device).view(1, 1, 12, 1)
    assert torch.equal(ops.assign_clusters(keys, centroids * powers, None), labels)
    assert torch.equal(ops.assign_clusters(keys * 0.125, centroids, None), labels)


def test_a_zero_centroid_has_cosine_zero(device: torch.device) -> None:
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], device=device).view(1, 1, 2, 2)
    centroids = torch.tensor([[1.0, 0.0], [0.0, 0.0]], device=device).view(1, 1, 2, 2)
    assert ops.assign_clusters(keys, centroids, None).tolist() == [[[0, 1]]]


@pytest.mark.parametrize("clusters", [300, 513, 2049])
def test_any_number_of_clusters_works(device: torch.device, clusters: int) -> None:
    shape = Shape(batch=1, heads=2, kv_len=2200, head_dim=16)
    keys, _ = token_major(shape, torch.float32, device)
    initial = sampled_tokens(1, shape.kv_len, clusters, device)
    index = ClusterIndex(*ops.cluster_keys(keys, initial, None, 2))
    labels = labels_of(index, shape.kv_len)
    assert (labels >= 0).all()
    assert_best(labels, keys, index.centroids)
    assert labels.max() >= clusters - clusters // 8


def test_as_many_clusters_as_tokens_gives_each_its_own(device: torch.device) -> None:
    keys, _ = token_major(Shape(kv_len=30), torch.float32, device)
    index = cluster_keys(keys, num_clusters=30)
    assert (index.indptr.diff() == 1).all()


def test_empty_clusters_keep_their_centroid(device: torch.device) -> None:
    """All keys point one way: every token goes to cluster 0."""
    keys = torch.zeros(1, 1, 20, 8, device=device)
    keys[..., 3] = torch.tensor([4.0, 8.0], device=device).repeat_interleave(10)
    initial = torch.tensor([[7, 12, 2]], dtype=torch.int32, device=device)
    centroids, indptr, _ = ops.cluster_keys(keys, initial, None, 20)
    assert indptr.tolist() == [[[0, 20, 20, 20]]]
    assert centroids[0, 0, :, 3].tolist() == [6.0, 8.0, 4.0]


def test_a_cluster_that_a_row_does_not_have_takes_no_token(device: torch.device) -> None:
    keys, _ = token_major(Shape(heads=3, kv_len=100), torch.float32, device)
    initial = sampled_tokens(2, 100, 8, device)
    initial[1, 3:] = -1
    index = ClusterIndex(*ops.cluster_keys(keys, initial, None, 20))
    assert (index.indptr[1, :, 3:] == 100).all()
    assert (index.centroids[1, :, 3:] == 0).all()
    alone = ops.cluster_keys(keys[1:], initial[1:, :3], None, 20)
    assert torch.equal(index.centroids[1:, :, :3], alone[0])
    assert torch.equal(index.indices[1:], alone[2])


def test_iteration_stops_at_a_fixed_point(device: torch.device) -> None:
    keys, _ = token_major(Shape(kv_len=300, head_dim=16), torch.float32, device)
    index = cluster_keys(keys, num_clusters=10, max_iter=100)
    labels = labels_of(index, 300)
    again = cluster_keys(keys, num_clusters=10, max_iter=1000)
    assert all(torch.equal(a, b) for a, b in zip(index, again, strict=True))
    assert torch.equal(ops.update_centroids(keys, labels, index.centroids), index.centroids)


def test_labels_belong_to_the_returned_centroids(device: torch.device) -> None:
    keys, _ = token_major(Shape(kv_len=400), torch.float32, device)
    for max_iter in (1, 2, 3):
        index = cluster_keys(keys, num_clusters=20, max_iter=max_iter)
        assert torch.equal(labels_of(index, 400), assign_clusters(keys, index.centroids))


def test_sums_are_not_taken_in_half_precision(device: torch.device) -> None:
    """5,000 ones: a float16 sum stops at 2,048, a bfloat16 sum at 256."""
    labels = torch.zeros(1, 1, 5000, dtype=torch.int32, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        keys = torch.ones(1, 1, 5000, 16, dtype=dtype, device=device)
        means = update_centroids(keys, labels, torch.zeros(1, 1, 1, 16, device=device))
        assert (means == 1).all()


def test_groups_of_keys_are_found_again(device: torch.device) -> None:
    """Well separated groups, one initial key from each: the clusters are the groups."""
    directions = torch.eye(12, device=device) * 5
    group = torch.randperm(240, generator=torch.Generator().manual_seed(0)).to(device) % 12
    noise = random(1, 1, 240, 12, dtype=torch.float32, device=device)
    keys = directions[group] + noise.clamp(-1, 1)
    firsts = torch.tensor([[int((group == name).nonzero()[0]) for name in range(12)]])
    index = ClusterIndex(*ops.cluster_keys(keys, firsts.int().to(device), None, 20))
    expected = index_of(group.view(1, 1, -1), index.centroids)
    assert torch.equal(index.indptr, expected.indptr)
    assert torch.equal(index.indices, expected.indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_change_a_bit(device: torch.device, dtype: torch.dtype) -> None:
    keys, _ = token_major(Shape(kv_len=333), dtype, device)
    assert not keys.is_contiguous()
    index = cluster_keys(keys, num_clusters=15)
    for other in (keys.contiguous(), keys.transpose(1, 2).contiguous().transpose(1, 2)):
        again = cluster_keys(other, num_clusters=15)
        assert all(torch.equal(a, b) for a, b in zip(index, again, strict=True))


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    keys, _ = token_major(Shape(batch=3, kv_len=260), torch.float32, device)
    together = cluster_keys(keys, num_clusters=11)
    for row in range(3):
        alone = cluster_keys(keys[row : row + 1], num_clusters=11)
        assert all(torch.equal(a[row], b[0]) for a, b in zip(together, alone, strict=True))


def test_a_padded_row_equals_the_unpadded_one(device: torch.device) -> None:
    """Padding full of NaN on both sides; 50, 100 and 3 tokens, the last with fewer clusters."""
    keys, _ = token_major(Shape(batch=3, kv_len=100), torch.float32, device)
    ranges, counts = [(40, 90), (0, 100), (97, 100)], [6, 9, 3]
    for row, (begin, end) in enumerate(ranges):
        keys[row, :, :begin] = keys[row, :, end:] = torch.nan
    valid = torch.tensor(ranges, dtype=torch.int32, device=device)
    num_clusters = torch.tensor(counts, device=device)
    together = cluster_keys(keys, num_clusters=num_clusters, valid=valid)
    assert together.centroids.shape[2] == 9
    for row, ((begin, end), count) in enumerate(zip(ranges, counts, strict=True)):
        alone = cluster_keys(keys[row : row + 1, :, begin:end], num_clusters=count)
        total = end - begin
        assert torch.equal(together.centroids[row, :, :count], alone.centroids[0])
        assert torch.equal(together.indptr[row, :, : count + 1], alone.indptr[0])
        assert (together.indptr[row, :, count:] == total).all()
        assert torch.equal(together.indices[row, :, :total] - begin, alone.indices[0])
        assert (together.indices[row, :, total:] == -1).all()


def test_permuted_heads_give_permuted_clusters(device: torch.device) -> None:
    keys, _ = token_major(Shape(heads=4, kv_len=200), torch.float32, device)
    order = torch.tensor([2, 0, 3, 1], device=device)
    index = cluster_keys(keys, num_clusters=10)
    permuted = cluster_keys(keys[:, order], num_clusters=10)
    assert all(torch.equal(a[:, order], b) for a, b in zip(index, permuted, strict=True))


def test_permuted_tokens_give_the_same_partition(device: torch.device) -> None:
    shape = Shape(batch=1, heads=1, kv_len=120, head_dim=16)
    keys, _ = token_major(shape, torch.float64, device)
    keys = (keys * 8).round().float()  # sums of small integers are exact in any order
    order = torch.randperm(120, generator=torch.Generator().manual_seed(5)).to(device)
    initial = sampled_tokens(1, 120, 8, device)
    place = torch.empty_like(order)
    place[order] = torch.arange(120, device=device)
    index = ClusterIndex(*ops.cluster_keys(keys, initial, None, 20))
    permuted = ClusterIndex(
        *ops.cluster_keys(keys[:, :, order], place[initial.long()].int(), None, 20)
    )
    assert torch.equal(index.centroids, permuted.centroids)
    assert torch.equal(labels_of(index, 120)[..., order], labels_of(permuted, 120))


@pytest.mark.parametrize(
    "shape", [Shape(kv_len=1000, clusters=25), Shape(1, 1, 1, 3000, 60)], ids=str
)
@pytest.mark.usefixtures("num_threads")
def test_the_number_of_threads_does_not_change_a_bit(shape: Shape) -> None:
    keys, _ = token_major(shape, torch.float32, torch.device("cpu"))
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        results.append(cluster_keys(keys, num_clusters=shape.clusters, max_iter=6))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_seeds_give_different_clusters(device: torch.device) -> None:
    keys, _ = token_major(Shape(kv_len=200), torch.float32, device)
    one, two, again = (cluster_keys(keys, num_clusters=9, seed=seed) for seed in (1, 2, 1))
    assert torch.equal(one.centroids, again.centroids)
    assert not torch.equal(one.centroids, two.centroids)


def test_opcheck(device: torch.device) -> None:
    keys, _ = token_major(Shape(kv_len=50), torch.float32, device)
    initial = sampled_tokens(2, 50, 5, device)
    valid = torch.tensor([[0, 50], [10, 40]], dtype=torch.int32, device=device)
    centroids, _, _ = ops.cluster_keys(keys, initial, None, 3)
    labels = ops.assign_clusters(keys, centroids, valid)
    torch.library.opcheck(ops.assign_clusters, (keys, centroids, None))
    torch.library.opcheck(ops.assign_clusters, (keys, centroids, valid))
    torch.library.opcheck(ops.update_centroids, (keys, labels, centroids))
    torch.library.opcheck(ops.cluster_keys, (keys, initial, None, 3))


def test_the_verbs_compile_without_a_graph_break(device: torch.device) -> None:
    def program(keys: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        index = cluster_keys(keys, num_clusters=7, seed=3, valid=valid)
        labels = assign_clusters(keys, index.centroids, valid=valid)
        return (*index, labels, update_centroids(keys, labels, index.centroids))

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for kv_len in (60, 75, 90):
            keys, _ = token_major(Shape(kv_len=kv_len, head_dim=32), torch.float32, device)
            valid = torch.tensor([[0, kv_len], [9, kv_len]], dtype=torch.int32, device=device)
            for actual, expected in zip(compiled(keys, valid), program(keys, valid), strict=True):
                assert torch.equal(actual, expected)
