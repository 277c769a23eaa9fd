"""The k-means kernels: tiles of clusters, sorted labels, convergence without the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clusterkv_ops import reference
from tests.ops.inputs import DTYPES, Shape, sampled_tokens, token_major

CPU = torch.device("cpu")
SHAPES = [
    Shape(kv_len=200, clusters=10),
    Shape(batch=1, kv_len=150, clusters=33, head_dim=128),
    Shape(batch=1, heads=1, kv_len=90, clusters=90, head_dim=80),
    Shape(batch=1, heads=1, kv_len=70, clusters=20, head_dim=256),
    Shape(batch=1, heads=1, kv_len=1, clusters=1, head_dim=33),
]


def blobs(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Keys around well separated directions: few of them lie between two centroids."""
    noise, _ = token_major(shape, torch.float32, CPU)
    generator = torch.Generator().manual_seed(8)
    centres = 8 * torch.randn(shape.clusters, shape.head_dim, generator=generator)
    which = torch.randint(0, shape.clusters, (shape.kv_len,), generator=generator)
    return (centres[which] + noise).to(dtype)


def ranges(*rows: tuple[int, int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def assert_same(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_index_matches(emulated: Any, dtype: torch.dtype, shape: Shape) -> None:
    keys = blobs(shape, dtype)
    initial = sampled_tokens(shape.batch, shape.kv_len, shape.clusters, CPU)
    actual = emulated.cluster_keys(keys, initial, None, 6)
    expected = reference.cluster_keys(keys, initial, None, 6)
    torch.testing.assert_close(actual[0], expected[0])
    assert_same(actual[1:], expected[1:])


@pytest.mark.parametrize("clusters", [300, 513, 2049])
def test_many_clusters_match(emulated: Any, clusters: int) -> None:
    shape = Shape(batch=1, heads=1, kv_len=2100, clusters=clusters, head_dim=16)
    keys = blobs(shape, torch.bfloat16)
    initial = sampled_tokens(1, 2100, clusters, CPU)
    actual = emulated.cluster_keys(keys, initial, None, 1)
    expected = reference.cluster_keys(keys, initial, None, 1)
    torch.testing.assert_close(actual[0], expected[0])
    assert_same(actual[1:], expected[1:])


def test_more_clusters_than_shared_memory_holds_match(emulated: Any) -> None:
    keys, _ = token_major(Shape(batch=1, heads=1, kv_len=600, head_dim=8), torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 13000, (1, 1, 600), generator=generator).int()
    before = torch.randn(1, 1, 13000, 8, generator=generator)
    actual = emulated.update_centroids(keys, labels, before)
    assert torch.equal(actual, reference.update_centroids(keys, labels, before))


@pytest.mark.parametrize("max_iter", [0, 1, 2, 50])
def test_each_head_stops_on_its_own(emulated: Any, max_iter: int) -> None:
    shape = Shape(kv_len=120, clusters=6)
    keys, _ = token_major(shape, torch.float32, CPU)
    keys[0, 0] = blobs(Shape(1, 1, 1, 120, 6), torch.float32)[0, 0]  # converges at once
    initial = sampled_tokens(2, 120, 6, CPU)
    together = emulated.cluster_keys(keys, initial, None, max_iter)
    for row in range(2):
        for head in range(2):
            own = keys[row : row + 1, head : head + 1]
            alone = emulated.cluster_keys(own, initial[row : row + 1], None, max_iter)
            assert_same([one[row, head] for one in together], [one[0, 0] for one in alone])


def test_ragged_rows_and_absent_clusters_match(emulated: Any) -> None:
    keys = blobs(Shape(batch=3, kv_len=130, clusters=8), torch.bfloat16)
    initial = sampled_tokens(3, 40, 8, CPU) + 60
    initial[1, 5:] = -1
    valid = ranges((0, 130), (50, 110), (60, 100))
    actual = emulated.cluster_keys(keys, initial, valid, 5)
    expected = reference.cluster_keys(keys, initial, valid, 5)
    torch.testing.assert_close(actual[0], expected[0])
    assert_same(actual[1:], expected[1:])


def test_assignment_outside_the_valid_range_is_none(emulated: Any) -> None:
    keys = blobs(Shape(kv_len=200, clusters=5), torch.float32)
    centroids = keys[:, :, 3:8].float().contiguous()
    for valid in (None, ranges((0, 200), (70, 71)), ranges((-5, 900), (9, 3))):
        given = valid if valid is None else valid.clamp(0, 200)
        actual = emulated.assign_clusters(keys, centroids, valid)
        assert torch.equal(actual, reference.assign_clusters(keys, centroids, given))


def test_labels_outside_the_clusters_are_ignored(emulated: Any) -> None:
    keys, _ = token_major(Shape(kv_len=100), torch.float16, CPU)
    labels = torch.randint(-3, 9, (2, 2, 100), dtype=torch.int32)
    before = torch.randn(2, 2, 5, 64)
    actual = emulated.update_centroids(keys, labels, before)
    assert torch.equal(actual, reference.update_centroids(keys, labels, before))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_index_with_slack_is_extended_in_place(emulated: Any, dtype: torch.dtype) -> None:
    shape = Shape(kv_len=300, clusters=9)
    keys = blobs(shape, dtype)
    first = reference.cluster_keys(keys[:, :, :200], sampled_tokens(2, 200, 9, CPU), None, 4)
    initial, valid = sampled_tokens(2, 80, 4, CPU), ranges((0, 100), (10, 90))
    given, expected = [], []
    for index in (given, expected):
        index.append(torch.zeros(2, 2, 20, 64))
        index.append(first[1][:, :, -1:].repeat(1, 1, 21))
        index.append(torch.full((2, 2, 400), -1, dtype=torch.int32))
        for whole, part in zip(index, first, strict=True):
            whole[:, :, : part.shape[2]] = part
    rest = [keys[:, :, 200:], initial, valid, 9, 200, 5]
    emulated.extend_index_(*given, *rest)
    reference.extend_index_(*expected, *rest)
    torch.testing.assert_close(given[0], expected[0])
    assert_same(given[1:], expected[1:])


def test_an_index_without_room_is_not_overrun(emulated: Any) -> None:
    keys, _ = token_major(Shape(batch=1, kv_len=50, clusters=3), torch.float32, CPU)
    index = [
        torch.zeros(1, 2, 3, 64),
        torch.zeros(1, 2, 4).int(),
        torch.full((1, 2, 20), -1).int(),
    ]
    emulated.extend_index_(*index, keys, sampled_tokens(1, 50, 3, CPU), None, 0, 0, 2)
    assert (index[2] < 50).all()
    with pytest.raises(RuntimeError, match="first_cluster: expected room for 3 clusters among 3"):
        emulated.extend_index_(*index, keys, sampled_tokens(1, 50, 3, CPU), None, 1, 0, 2)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_any_order_of_threads_gives_the_same_bits(
    emulated: Any, seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(batch=1, kv_len=400, clusters=12)
    keys, _ = token_major(shape, torch.bfloat16, CPU)
    initial = sampled_tokens(1, 400, 12, CPU)
    in_order = emulated.cluster_keys(keys, initial, None, 4)
    monkeypatch.setenv("CLUSTERKV_EMULATOR_SEED", seed)
    assert_same(emulated.cluster_keys(keys, initial, None, 4), in_order)
