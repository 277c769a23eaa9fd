"""Growth of the index, window by window, and the sample that clustering starts from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clusterkv_ops import ClusterIndex, cluster_keys, extend_index, initial_tokens
from tests.ops.inputs import DTYPES, Shape, sampled_tokens, token_major

ops = torch.ops.clusterkv


def with_slack(index: ClusterIndex, clusters: int, tokens: int) -> ClusterIndex:
    """The index in larger tensors, as the runtime keeps it."""
    batch, heads, held, head_dim = index.centroids.shape
    centroids = index.centroids.new_zeros(batch, heads, clusters, head_dim)
    centroids[:, :, :held] = index.centroids
    indptr = index.indptr[:, :, -1:].repeat(1, 1, clusters + 1)
    indptr[:, :, : held + 1] = index.indptr
    indices = index.indices.new_full((batch, heads, tokens), -1)
    indices[:, :, : index.indices.shape[2]] = index.indices
    return ClusterIndex(centroids, indptr, indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [33, 64, 128])
def test_the_window_is_clustered_among_itself(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    keys, _ = token_major(Shape(kv_len=200, head_dim=head_dim), dtype, device)
    before = cluster_keys(keys[:, :, :150], num_clusters=10)
    window = cluster_keys(keys[:, :, 150:], num_clusters=4)
    after = extend_index(before, keys[:, :, 150:], num_clusters=4, first_token=150)
    assert torch.equal(after.centroids, torch.cat([before.centroids, window.centroids], dim=2))
    assert torch.equal(after.indptr[:, :, :11], before.indptr)
    assert torch.equal(after.indptr[:, :, 10:], window.indptr + 150)
    assert torch.equal(after.indices, torch.cat([before.indices, window.indices + 150], dim=2))


def test_three_windows_in_place_equal_three_functional_ones(device: torch.device) -> None:
    keys, _ = token_major(Shape(kv_len=190), torch.float32, device)
    grown = cluster_keys(keys[:, :, 16:100], num_clusters=6)
    in_place = with_slack(grown, clusters=25, tokens=260)
    for number, first_token in enumerate((100, 130, 160)):
        window = keys[:, :, first_token : first_token + 30]
        grown = extend_index(grown, window, num_clusters=3, first_token=first_token)
        valid = torch.tensor([[0, 30]] * 2, dtype=torch.int32, device=device)
        initial = initial_tokens(valid, 3, kv_len=30)
        first_cluster = 6 + 3 * number
        ops.extend_index_(*in_place, window, initial, None, first_cluster, first_token, 20)
        end = first_cluster + 3
        total = int(grown.indptr[0, 0, -1])
        assert torch.equal(in_place.centroids[:, :, :end], grown.centroids)
        assert torch.equal(in_place.indptr[:, :, : end + 1], grown.indptr)
        assert (in_place.indptr[:, :, end:] == total).all()
        assert torch.equal(in_place.indices[:, :, :total], grown.indices[:, :, :total])
    assert (in_place.centroids[:, :, 15:] == 0).all()
    assert (in_place.indices[:, :, 174:] == -1).all()


def test_rows_of_different_lengths_stay_apart(device: torch.device) -> None:
    """Row 0 adds 20 tokens, row 1 none, row 2 adds 2 with fewer clusters than the others."""
    keys, _ = token_major(Shape(batch=3, kv_len=80), torch.float32, device)
    keys[1, :, 60:] = torch.nan
    valid = torch.tensor([[0, 60], [30, 60], [55, 60]], dtype=torch.int32, device=device)
    before = cluster_keys(keys[:, :, :60], num_clusters=4, valid=valid)
    added = torch.tensor([[0, 20], [0, 0], [18, 20]], dtype=torch.int32, device=device)
    window = keys[:, :, 60:]
    after = extend_index(before, window, num_clusters=3, first_token=60, valid=added)
    assert after.indptr[:, 0, 4:].tolist() == [
        [60, *after.indptr[0, 0, 5:7].tolist(), 80],
        [30] * 4,
        [5, 6, 7, 7],
    ]
    assert after.indices[1, :, 30:].unique().tolist() == [-1]
    for head in range(2):
        assert set(after.indices[2, head, 5:7].tolist()) == {78, 79}
    alone = extend_index(
        ClusterIndex(*(tensor[:1] for tensor in before)),
        window[:1],
        num_clusters=3,
        first_token=60,
    )
    assert all(torch.equal(a[:1], b) for a, b in zip(after, alone, strict=True))


def test_the_old_index_is_not_touched(device: torch.device) -> None:
    keys, _ = token_major(Shape(kv_len=90), torch.float32, device)
    index = cluster_keys(keys, num_clusters=5)
    copies = [tensor.clone() for tensor in index]
    extend_index(index, keys[:, :, :20], num_clusters=2, first_token=90)
    assert all(torch.equal(a, b) for a, b in zip(index, copies, strict=True))


def test_an_index_without_room_is_refused(device: torch.device) -> None:
    """A raw operator raises instead of writing past the end, and leaves the process usable."""
    if device.type == "cuda":
        pytest.skip("device-side bounds are clamped, not raised, on CUDA")
    keys, _ = token_major(Shape(kv_len=90), torch.float32, device)
    index = cluster_keys(keys[:, :, :60], num_clusters=5)
    initial = sampled_tokens(2, 30, 3, device)
    arguments = (keys[:, :, 60:], initial, None, 5, 60, 20)
    with pytest.raises(RuntimeError):  # no place for the clusters
        ops.extend_index_(*with_slack(index, 7, 200), *arguments)
    with pytest.raises((RuntimeError, IndexError)):  # no place for the tokens
        ops.extend_index_(*with_slack(index, 9, 70), *arguments)
    ops.extend_index_(*with_slack(index, 8, 90), *arguments)


def test_opcheck(device: torch.device) -> None:
    keys, _ = token_major(Shape(kv_len=60), torch.float32, device)
    index = with_slack(cluster_keys(keys[:, :, :40], num_clusters=5), clusters=9, tokens=90)
    initial = sampled_tokens(2, 20, 3, device)
    torch.library.opcheck(ops.extend_index_, (*index, keys[:, :, 40:], initial, None, 5, 40, 3))


def test_the_verb_compiles_without_a_graph_break(device: torch.device) -> None:
    def program(index: ClusterIndex, keys: Tensor) -> ClusterIndex:
        return extend_index(index, keys, num_clusters=3, first_token=60)

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    keys, _ = token_major(Shape(kv_len=110, head_dim=32), torch.float32, device)
    index = cluster_keys(keys[:, :, :60], num_clusters=5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for end in (80, 95, 110):
            window = keys[:, :, 60:end]
            actual, expected = compiled(index, window), program(index, window)
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_the_sample_depends_on_length_count_and_seed_only(device: torch.device) -> None:
    valid = torch.tensor([[0, 50], [30, 80], [7, 9]], dtype=torch.int32, device=device)
    sample = initial_tokens(valid, 6, kv_len=80, seed=4)
    assert sample.dtype == torch.int32
    assert torch.equal(sample[0], sample[1] - 30)
    assert sorted(sample[2].tolist()) == [-1, -1, -1, -1, 7, 8]
    alone = initial_tokens(valid[:1], 6, kv_len=50, seed=4)
    assert torch.equal(sample[:1], alone)
    fewer = initial_tokens(valid, torch.tensor([4, 6, 1], device=device), kv_len=80, seed=4)
    assert torch.equal(fewer[0, :4], sample[0, :4])
    assert fewer[0, 4:].tolist() == [-1, -1]
    assert not torch.equal(sample, initial_tokens(valid, 6, kv_len=80, seed=5))


def test_the_sample_stays_the_same_between_versions(device: torch.device) -> None:
    valid = torch.tensor([[0, 1000]], dtype=torch.int32, device=device)
    assert initial_tokens(valid, 6, kv_len=1000).tolist() == [[742, 905, 651, 368, 810, 525]]
    assert initial_tokens(valid, 6, kv_len=1000, seed=7).tolist() == [[94, 165, 17, 344, 875, 356]]


def test_the_sample_is_uniform_and_without_replacement() -> None:
    """Each of 1,000 tokens is drawn 100 times of 2,000: mean and variance of a binomial."""
    valid = torch.tensor([[0, 1000]], dtype=torch.int32)
    drawn = torch.zeros(1000)
    for seed in range(2000):
        sample = initial_tokens(valid, 50, kv_len=1000, seed=seed)[0].long()
        assert sample.unique().numel() == 50
        drawn[sample] += 1
    variance = 2000 * 0.05 * 0.95
    assert abs(float(drawn.var()) / variance - 1) < 5 * (2 / 1000) ** 0.5  # 5 standard errors
    assert float((drawn - 100).abs().max()) < 5 * variance**0.5
