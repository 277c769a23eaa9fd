"""The operators themselves, called without the verbs' checks: wrong calls must not crash."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from tests.ops.test_bad_input import Good, good_arguments, run_all

ops = torch.ops.clusterkv


def initial(good: Good, *tokens: int) -> Tensor:
    return torch.tensor([tokens] * 2, dtype=torch.int32, device=good.keys.device)


def attention(good: Good, **changed: Tensor | None) -> object:
    arguments = {
        "query": good.query,
        "keys": good.keys,
        "values": good.values,
        "indices": good.selection.indices,
        "spans": good.spans,
        "mask": None,
        "slots": None,
        "slot_keys": None,
        "slot_values": None,
        **changed,
    }
    return ops.selected_attention(*arguments.values(), 0.25)


# Shapes and dtypes that can't be worked with: every implementation refuses them.
REFUSED: dict[str, Callable[[Good], object]] = {
    "centroids of another width": lambda g: ops.assign_clusters(
        g.keys, g.index.centroids[..., :8], None
    ),
    "initial tokens past the keys": lambda g: ops.cluster_keys(g.keys, initial(g, 3, 99), None, 5),
    "an index without room for the clusters": lambda g: ops.extend_index_(
        *(tensor.clone() for tensor in g.index), g.keys, initial(g, 3, 9), None, 5, 40, 5
    ),
    "an unknown head rule": lambda g: ops.select_clusters(g.query, *g.index, 8, "mean", 1.0),
    "a query of another width": lambda g: ops.select_clusters(
        g.query[..., :8], *g.index, 8, "query_head", 1.0
    ),
    "heads that can't be shared out": lambda g: ops.select_clusters(
        g.query[:, :5], *g.index, 8, "query_head", 1.0
    ),
    "a wanted token past the keys": lambda g: ops.recall(
        g.keys, g.values, g.selection.indices + 40, *(t.clone() for t in g.cache), 1
    ),
    "no free slot": lambda g: ops.recall(
        g.keys,
        g.values,
        g.selection.indices,
        g.cache.slot_keys.clone(),
        g.cache.slot_values.clone(),
        torch.full_like(g.cache.slot_indices, 39),
        g.cache.slot_ages.clone(),
        1,
    ),
    "an attended token past the keys": lambda g: attention(g, indices=g.selection.indices + 40),
    "a slot past the cache": lambda g: attention(
        g,
        slots=g.recalled.slots + 40,
        slot_keys=g.cache.slot_keys,
        slot_values=g.cache.slot_values,
    ),
    "fewer values than keys": lambda g: attention(g, values=g.values[:, :, :5]),
}

# Contents that contradict each other: an error or any result will do.
SURVIVED: dict[str, Callable[[Good], object]] = {
    "keys that aren't numbers": lambda g: ops.cluster_keys(
        g.keys * float("nan"), initial(g, 3, 9), None, 5
    ),
    "a range beyond the keys": lambda g: ops.assign_clusters(
        g.keys, g.index.centroids, initial(g, -7, 999)
    ),
    "labels beyond the clusters": lambda g: ops.update_centroids(
        g.keys, torch.full_like(g.keys[..., 0], 99, dtype=torch.int32), g.index.centroids
    ),
    "an index that contradicts itself": lambda g: ops.select_clusters(
        g.query,
        g.index.centroids,
        g.index.indptr.flip(-1) * 9 - 50,
        g.index.indices,
        8,
        "kv_head",
        1.0,
    ),
    "a query that isn't a number": lambda g: ops.select_clusters(
        g.query * float("nan"), *g.index, 8, "query_head", 1.0
    ),
    "a budget far above the tokens": lambda g: ops.select_clusters(
        g.query, *g.index, 5000, "query_head", 1.0
    ),
    "spans beyond the keys": lambda g: attention(
        g, spans=initial(g, -9, 7, 30, 2**31 - 1).view(2, 2, 2)
    ),
    "spans that end before they begin": lambda g: attention(
        g, spans=initial(g, 9, 3, 40, 20).view(2, 2, 2)
    ),
    "a window that ends before it begins": lambda g: ops.cluster_keys(
        g.keys, initial(g, 3, 9), initial(g, 20, 10), 5
    ),
    "keys of no batch": lambda g: ops.cluster_keys(g.keys[:0], initial(g, 3, 9)[:0], None, 5),
    "initial tokens in padding": lambda g: ops.cluster_keys(
        g.keys, initial(g, 3, 9), initial(g, 20, 40), 5
    ),
}


@pytest.fixture
def good(device: torch.device) -> Good:
    if device.type == "cuda":
        pytest.skip("out of range contents stop a CUDA kernel; its checks are those of the verbs")
    return good_arguments(device)


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_refuses_what_it_cannot_do(good: Good, name: str) -> None:
    before = run_all(good)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        REFUSED[name](good)
    assert all(torch.equal(a, b) for a, b in zip(before, run_all(good), strict=True))


@pytest.mark.parametrize("name", SURVIVED)
def test_an_operator_survives_contradictions(good: Good, name: str) -> None:
    before = run_all(good)
    with suppress(RuntimeError, IndexError, ValueError):
        SURVIVED[name](good)
    assert all(torch.equal(a, b) for a, b in zip(before, run_all(good), strict=True))
