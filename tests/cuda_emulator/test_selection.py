"""The selection kernels: ranking beyond a block, cuts at a budget, ties, nonsense in an index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clusterkv_ops import reference

RULES = ["query_head", "kv_head"]


def integers(*shape: int, seed: int) -> Tensor:
    """Small integers as float32: every inner product is exact, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def random_rows(batch: int, heads: int, kv_len: int, clusters: int) -> tuple[Tensor, Tensor]:
    """indptr and indices of random labels; a fifth of the clusters is empty."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, clusters, (batch, heads, kv_len), generator=generator)
    labels = torch.where(labels % 5 == 4, labels - 1, labels)
    counts = torch.zeros(batch, heads, clusters, dtype=torch.int64)
    counts.scatter_add_(2, labels, torch.ones_like(labels))
    indptr = torch.zeros(batch, heads, clusters + 1, dtype=torch.int32)
    indptr[..., 1:] = counts.cumsum(-1)
    return indptr, labels.argsort(dim=-1, stable=True).int()


def arguments(heads: int, group: int, clusters: int, budget: int, rule: str) -> list[Any]:
    indptr, indices = random_rows(1, heads, 6 * clusters, clusters)
    query = integers(1, heads * group, 1, 40, seed=2)
    centroids = integers(1, heads, clusters, 40, seed=3)
    return [query, centroids, indptr, indices, budget, rule, 0.01]


def assert_equal(emulated: Any, given: list[Any]) -> None:
    indices, num_selected = emulated.select_clusters(*given)
    expected = reference.select_clusters(*given)
    assert torch.equal(num_selected, expected[1])
    assert torch.equal(indices, expected[0].int())


@pytest.mark.parametrize("clusters", [1, 7, 300, 513, 2049, 16384])
@pytest.mark.parametrize("budget", [1, 100, 5000])
def test_the_ranking_is_exact_for_any_number_of_clusters(
    emulated: Any, clusters: int, budget: int
) -> None:
    assert_equal(emulated, arguments(1, 1, clusters, budget, "query_head"))


@pytest.mark.parametrize("group", [1, 3, 7, 8, 13])
@pytest.mark.parametrize("rule", RULES)
def test_groups_match(emulated: Any, group: int, rule: str) -> None:
    assert_equal(emulated, arguments(2, group, 60, 50, rule))


@pytest.mark.parametrize("rule", RULES)
def test_equal_scores_go_to_the_lower_cluster(emulated: Any, rule: str) -> None:
    given = arguments(2, 2, 400, 333, rule)
    given[0] = torch.zeros_like(given[0])
    given[2] = torch.arange(401).mul(6).int().expand(1, 2, 401)
    assert_equal(emulated, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_queries_match(emulated: Any, dtype: torch.dtype, rule: str) -> None:
    given = arguments(2, 4, 100, 77, rule)
    given[0] = given[0].to(dtype)
    assert_equal(emulated, given)


def test_views_of_a_larger_index_match(emulated: Any) -> None:
    given = arguments(2, 2, 90, 64, "query_head")
    wide = [torch.nn.functional.pad(given[i], (0, 5)) for i in (1, 2, 3)]
    given[1:4] = wide[0][..., :40], wide[1][..., :91], wide[2][..., :540]
    assert not given[1].is_contiguous()
    assert_equal(emulated, given)


@pytest.mark.parametrize("rule", RULES)
def test_an_index_without_tokens_selects_none(emulated: Any, rule: str) -> None:
    given = arguments(2, 2, 30, 64, rule)
    given[2] = torch.zeros_like(given[2])
    indices, num_selected = emulated.select_clusters(*given)
    assert (indices == -1).all()
    assert (num_selected == 0).all()


def test_nonsense_in_indptr_reads_nothing_outside(emulated: Any) -> None:
    given = arguments(1, 1, 50, 64, "query_head")
    given[2] = torch.randint(-(2**31), 2**31 - 1, (1, 1, 51), dtype=torch.int32)
    indices, num_selected = emulated.select_clusters(*given)
    assert 0 <= num_selected.item() <= 64
    assert (indices < 300).all()


@pytest.mark.parametrize("rule", RULES)
def test_two_calls_in_a_row_are_independent(emulated: Any, rule: str) -> None:
    first, second = arguments(2, 3, 80, 50, rule), arguments(1, 2, 300, 9, rule)
    for given in (first, second, first):
        assert_equal(emulated, given)
