"""One table of bad calls, for every device: the exact exception, and the next good call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import clusterkv_ops as ck
from clusterkv_ops import ClusterIndex, RecallCache, RecalledTokens, TokenSelection
from tests.ops.inputs import Shape, query_for, token_major

SHAPE = Shape(batch=2, heads=2, group=3, kv_len=40, clusters=5, head_dim=16)


class Good(NamedTuple):
    """Arguments that work: 2 rows, 2 KV heads, 6 query heads, 40 tokens, 5 clusters."""

    keys: Tensor
    values: Tensor
    query: Tensor
    index: ClusterIndex
    selection: TokenSelection
    spans: Tensor
    mask: Tensor
    cache: RecallCache
    recalled: RecalledTokens


def good_arguments(device: torch.device) -> Good:
    keys, values = token_major(SHAPE, torch.float32, device)
    query = query_for(SHAPE, torch.float32, device)
    index = ck.cluster_keys(keys[:, :, 4:], num_clusters=5)
    selection = ck.select_clusters(query, index, budget=8)
    cache = ck.empty_cache(keys, num_slots=40)
    recalled = ck.recall(keys, values, selection, cache)
    spans = ck.always_attended(
        40, num_sink_tokens=0, num_recent_tokens=0, batch_size=2, device=device
    )
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool, device=device)
    return Good(keys, values, query, index, selection, spans, mask, cache, recalled)


def run_all(good: Good) -> list[Tensor]:
    """Every verb once, on a fresh cache."""
    index = ck.cluster_keys(good.keys, num_clusters=5)
    index = ck.extend_index(index, good.keys[:, :, :9], num_clusters=2, first_token=30)
    index = index._replace(indices=index.indices[:, :, :49])
    selection = ck.select_clusters(good.query, good.index, budget=8)
    cache = ck.empty_cache(good.keys, num_slots=40)
    recalled = ck.recall(good.keys, good.values, selection, cache)
    state = attend(good, selection=selection, recalled=recalled, cache=cache)
    labels = ck.assign_clusters(good.keys, good.index.centroids)
    means = ck.update_centroids(good.keys, labels, good.index.centroids)
    return [*index, *selection, *recalled, *ck.merge_states(state, state), labels, means]


def cluster(good: Good, **changed: Any) -> object:
    return ck.cluster_keys(changed.pop("keys", good.keys), **{"num_clusters": 5, **changed})


def extend(good: Good, **changed: Any) -> object:
    index, keys = changed.pop("index", good.index), changed.pop("keys", good.keys)
    return ck.extend_index(index, keys, **{"num_clusters": 2, "first_token": 40, **changed})


def select(good: Good, **changed: Any) -> object:
    query, index = changed.pop("query", good.query), changed.pop("index", good.index)
    return ck.select_clusters(query, index, **{"budget": 8, **changed})


def fetch(good: Good, **changed: Any) -> object:
    names = ("keys", "values", "selection", "cache")
    positional = [changed.pop(name, getattr(good, name)) for name in names]
    return ck.recall(*positional, **changed)


def attend(good: Good, **changed: Any) -> Any:
    names = ("query", "keys", "values", "selection")
    positional = [changed.pop(name, getattr(good, name)) for name in names]
    return ck.selected_attention(*positional, **{"spans": good.spans, **changed})


def merge(good: Good, **changed: Any) -> object:
    state = ck.AttentionState(good.query, good.query[..., 0].float())
    return ck.merge_states(state, changed.pop("b", None) or state._replace(**changed))


def poked(tensor: Tensor, place: tuple[Any, ...], value: float) -> Tensor:
    copy = tensor.clone()
    copy[place] = value
    return copy


def int32(*rows: object, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


FLOATS = "dtype float32 or bfloat16 or float16"
Case = tuple[Callable[[Good], object], type[Exception], str]

TYPES: dict[str, Case] = {
    "keys is a list": (
        lambda g: cluster(g, keys=[1.0]),
        TypeError,
        "keys: expected a tensor, got list",
    ),
    "num_clusters is a float": (
        lambda g: cluster(g, num_clusters=2.5),
        TypeError,
        "num_clusters: expected an int, got float",
    ),
    "num_clusters is a bool": (
        lambda g: cluster(g, num_clusters=True),
        TypeError,
        "num_clusters: expected an int, got bool",
    ),
    "index is a tensor": (
        lambda g: select(g, index=g.keys),
        TypeError,
        "index: expected ClusterIndex, got Tensor",
    ),
    "selection is a tensor": (
        lambda g: attend(g, selection=g.selection.indices),
        TypeError,
        "selection: expected TokenSelection, got Tensor",
    ),
    "cache is missing": (
        lambda g: fetch(g, cache=None),
        TypeError,
        "cache: expected RecallCache, got NoneType",
    ),
    "spans are missing": (
        lambda g: attend(g, spans=None),
        TypeError,
        "spans: expected a tensor, got NoneType",
    ),
    "state is a list": (
        lambda g: merge(g, b=[g.query]),
        TypeError,
        "b: expected AttentionState, got list",
    ),
    "budget is a float": (
        lambda g: ck.ClusterKVConfig(budget=0.5),  # type: ignore[arg-type]
        TypeError,
        "budget: expected an int, got 0.5",
    ),
}

CLUSTERING: dict[str, Case] = {
    "keys of rank 3": (
        lambda g: cluster(g, keys=g.keys[0]),
        ValueError,
        "keys: expected shape [B, Hkv, T, D], got [2, 40, 16]",
    ),
    "integer keys": (
        lambda g: cluster(g, keys=g.keys.long()),
        ValueError,
        f"keys: expected {FLOATS}, got int64",
    ),
    "keys that want a gradient": (
        lambda g: cluster(g, keys=g.keys.clone().requires_grad_()),
        ValueError,
        "keys: expected no gradient (inference only: use torch.no_grad()), got requires_grad",
    ),
    "keys with strided rows": (
        lambda g: cluster(g, keys=g.keys[..., ::2]),
        ValueError,
        "keys: expected stride 1 in the last dimension, got 2",
    ),
    "head_dim of 257": (
        lambda g: cluster(g, keys=g.keys.new_zeros(1, 1, 40, 257)),
        ValueError,
        "keys: expected head_dim from 1 to 256, got 257",
    ),
    "an empty prompt": (
        lambda g: cluster(g, keys=g.keys[:, :, :0]),
        ValueError,
        "keys: expected at least one token, got [2, 2, 0, 16]",
    ),
    "a NaN key": (
        lambda g: cluster(g, keys=poked(g.keys, (1, 1, 7, 3), float("nan"))),
        ValueError,
        "keys: expected finite values, got NaN or infinity",
    ),
    "an infinite key": (
        lambda g: extend(g, keys=poked(g.keys, (0, 1, 7, 3), float("-inf"))),
        ValueError,
        "keys: expected finite values, got NaN or infinity",
    ),
    "no clusters": (
        lambda g: cluster(g, num_clusters=0),
        ValueError,
        "num_clusters: expected at least 1, got 0",
    ),
    "more clusters than tokens": (
        lambda g: cluster(g, num_clusters=41),
        ValueError,
        "num_clusters: expected at most the 40 tokens of keys, got 41",
    ),
    "num_clusters of another batch size": (
        lambda g: cluster(g, num_clusters=torch.tensor([3, 3, 3])),
        ValueError,
        "num_clusters: expected shape [2], got [3]",
    ),
    "no iterations": (
        lambda g: cluster(g, max_iter=0),
        ValueError,
        "max_iter: expected at least 1, got 0",
    ),
    "a negative seed": (
        lambda g: cluster(g, seed=-1),
        ValueError,
        "seed: expected at least 0, got -1",
    ),
    "valid in int64": (
        lambda g: cluster(g, valid=g.spans[:, 0].long()),
        ValueError,
        "valid: expected dtype int32, got int64",
    ),
    "valid of another batch size": (
        lambda g: cluster(g, valid=g.spans[:1, 0]),
        ValueError,
        "valid: expected shape [2, 2], got [1, 2]",
    ),
    "valid past the keys": (
        lambda g: cluster(g, valid=int32([0, 41], [0, 40], device=g.keys.device)),
        ValueError,
        "valid: expected begin and end in order, from 0 to 40, got [[0, 41], [0, 40]]",
    ),
    "valid that ends before it begins": (
        lambda g: cluster(g, valid=int32([0, 40], [9, 8], device=g.keys.device)),
        ValueError,
        "valid: expected begin and end in order, from 0 to 40, got [[0, 40], [9, 8]]",
    ),
    "half precision centroids": (
        lambda g: ck.assign_clusters(g.keys, g.index.centroids.half()),
        ValueError,
        "centroids: expected dtype float32, got float16",
    ),
    "centroids of other heads": (
        lambda g: ck.assign_clusters(g.keys, g.index.centroids[:, :1]),
        ValueError,
        "centroids: expected shape [2, 2, C, 16], got [2, 1, 5, 16]",
    ),
    "no centroids": (
        lambda g: ck.assign_clusters(g.keys, g.index.centroids[:, :, :0]),
        ValueError,
        "centroids: expected at least one cluster, got [2, 2, 0, 16]",
    ),
    "a label past the clusters": (
        lambda g: ck.update_centroids(
            g.keys, g.index.indices.new_full((2, 2, 40), 5), g.index.centroids
        ),
        ValueError,
        "labels: expected entries from -1 to 4, got 5 to 5",
    ),
    "the batch size changes": (
        lambda g: extend(g, keys=g.keys[:1]),
        ValueError,
        "index.centroids: expected shape [1, 2, C, 16], got [2, 2, 5, 16]",
    ),
    "a window before the sequence": (
        lambda g: extend(g, first_token=-1),
        ValueError,
        "first_token: expected at least 0, got -1",
    ),
}

SELECTION: dict[str, Case] = {
    "indptr that decreases": (
        lambda g: select(g, index=g.index._replace(indptr=poked(g.index.indptr, (0, 0, 2), 0))),
        ValueError,
        "index.indptr: expected rows that never decrease, got a decrease",
    ),
    "indptr that starts at 1": (
        lambda g: select(g, index=g.index._replace(indptr=poked(g.index.indptr, (0, 1, 0), 1))),
        ValueError,
        "index.indptr: expected rows that start at 0, got [0, 1, 0, 0]",
    ),
    "indptr past the tokens": (
        lambda g: select(g, index=g.index._replace(indptr=poked(g.index.indptr, (0, 1, -1), 37))),
        ValueError,
        "index.indptr: expected at most 36 tokens, got 37",
    ),
    "indptr of other clusters": (
        lambda g: select(g, index=g.index._replace(indptr=g.index.indptr[:, :, :5])),
        ValueError,
        "index.indptr: expected shape [2, 2, 6], got [2, 2, 5]",
    ),
    "a hole in a cluster": (
        lambda g: select(g, index=g.index._replace(indices=poked(g.index.indices, (0, 0, 3), -1))),
        ValueError,
        "index.indices: expected a token at each place that indptr spans, got -1",
    ),
    "no budget": (
        lambda g: select(g, budget=0),
        ValueError,
        "budget: expected at least 1, got 0",
    ),
    "an unknown head rule": (
        lambda g: select(g, head_rule="mean"),
        ValueError,
        "head_rule: expected query_head or kv_head, got 'mean'",
    ),
    "two query tokens": (
        lambda g: select(g, query=g.query.expand(2, 6, 2, 16)),
        ValueError,
        "query: expected shape [2, Hq, 1, 16], got [2, 6, 2, 16]",
    ),
    "query heads that can't be shared out": (
        lambda g: select(g, query=g.query[:, :5]),
        ValueError,
        "query: expected a multiple of 2 heads, got 5",
    ),
    "a query of another width": (
        lambda g: select(g, query=g.query[..., :8]),
        ValueError,
        "query: expected shape [2, Hq, 1, 16], got [2, 6, 1, 8]",
    ),
    "a query on another device": (
        lambda g: select(g, query=g.query.to("meta")),
        ValueError,
        "query: expected device {device} like index.centroids, got meta",
    ),
}

RECALL: dict[str, Case] = {
    "a selected token past the keys": (
        lambda g: fetch(g, keys=g.keys[:, :, :9], values=g.values[:, :, :9]),
        ValueError,
        "selection.indices: expected entries from -1 to 8, got {low} to {high}",
    ),
    "too few slots": (
        lambda g: fetch(g, cache=ck.empty_cache(g.keys, num_slots=39)),
        ValueError,
        "cache: expected at least 40 slots, got 39",
    ),
    "no slots": (
        lambda g: ck.empty_cache(g.keys, num_slots=0),
        ValueError,
        "num_slots: expected at least 1, got 0",
    ),
    "a cache of another dtype": (
        lambda g: fetch(g, cache=ck.empty_cache(g.keys.half(), num_slots=40)),
        ValueError,
        "cache.slot_keys: expected dtype float32, got float16",
    ),
    "a cache of another batch size": (
        lambda g: fetch(g, cache=ck.empty_cache(g.keys[:1], num_slots=40)),
        ValueError,
        "cache.slot_keys: expected shape [2, 2, N, 16], got [1, 2, 40, 16]",
    ),
    "negative recall_steps": (
        lambda g: fetch(g, recall_steps=-1),
        ValueError,
        "recall_steps: expected at least 0, got -1",
    ),
    "fewer values than keys": (
        lambda g: fetch(g, values=g.values[:, :, 1:]),
        ValueError,
        "values: expected shape [2, 2, 40, 16], got [2, 2, 39, 16]",
    ),
    "values of another dtype": (
        lambda g: fetch(g, values=g.values.half()),
        ValueError,
        "values: expected dtype float32, got float16",
    ),
    "a selection in int64": (
        lambda g: fetch(g, selection=TokenSelection(g.selection.indices.long(), g.selection[1])),
        ValueError,
        "selection.indices: expected dtype int32, got int64",
    ),
}

ATTENTION: dict[str, Case] = {
    "a query of another dtype": (
        lambda g: attend(g, query=g.query.half()),
        ValueError,
        "query: expected dtype float32 like keys, got float16",
    ),
    "a selection of 3 heads": (
        lambda g: attend(g, selection=TokenSelection(g.selection[0][:, :3], g.selection[1])),
        ValueError,
        "selection.indices: expected 6 or 2 heads, got 3",
    ),
    "one span": (
        lambda g: attend(g, spans=g.spans[:, 0]),
        ValueError,
        "spans: expected shape [2, 2, 2], got [2, 2]",
    ),
    "a span past the keys": (
        lambda g: attend(g, spans=g.spans[:1].expand(2, 2, 2) + 1),
        ValueError,
        "spans: expected begin and end in order, from 0 to 40, "
        "got [[[1, 1], [41, 41]], [[1, 1], [41, 41]]]",
    ),
    "spans that overlap": (
        lambda g: attend(g, spans=int32(*[[[0, 9], [8, 40]]] * 2, device=g.keys.device)),
        ValueError,
        "spans: expected sinks that end before the recent tokens begin, "
        "got [[[0, 9], [8, 40]], [[0, 9], [8, 40]]]",
    ),
    "a mask of another length": (
        lambda g: attend(g, mask=g.mask[..., 1:]),
        ValueError,
        "mask: expected shape [2, 1 or Hq, 1, 40], got [2, 1, 1, 39]",
    ),
    "a mask of 2 heads": (
        lambda g: attend(g, mask=g.mask.expand(2, 2, 1, 40)),
        ValueError,
        "mask: expected 1 or 6 heads, got 2",
    ),
    "an integer mask": (
        lambda g: attend(g, mask=g.mask.long()),
        ValueError,
        "mask: expected dtype bool or float32 or bfloat16 or float16, got int64",
    ),
    "recalled tokens without their cache": (
        lambda g: attend(g, recalled=g.recalled),
        ValueError,
        "cache: expected both recalled and cache, or neither, got one of them",
    ),
    "slots of another selection": (
        lambda g: attend(
            g, recalled=g.recalled._replace(slots=g.recalled.slots[..., 1:]), cache=g.cache
        ),
        ValueError,
        "recalled.slots: expected shape [2, 6, 8], got [2, 6, 7]",
    ),
    "a slot past the cache": (
        lambda g: attend(
            g, recalled=g.recalled._replace(slots=g.recalled.slots * 0 + 40), cache=g.cache
        ),
        ValueError,
        "recalled.slots: expected entries from -1 to 39, got 40 to 40",
    ),
    "values on another device": (
        lambda g: attend(g, values=g.values.to("meta")),
        ValueError,
        "values: expected device {device} like keys, got meta",
    ),
    "states of other shapes": (
        lambda g: merge(g, lse=g.query[:, :5, :, 0]),
        ValueError,
        "b.lse: expected shape [2, 6, 1], got [2, 5, 1]",
    ),
    "a half precision lse": (
        lambda g: merge(g, lse=g.query[..., 0].half()),
        ValueError,
        "b.lse: expected dtype float32, got float16",
    ),
    "a budget of the sinks alone": (
        lambda g: ck.ClusterKVConfig(budget=16),
        ValueError,
        "budget: expected at least num_sink_tokens + 1 = 17, got 16",
    ),
}

CASES = {**TYPES, **CLUSTERING, **SELECTION, **RECALL, **ATTENTION}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_raises_and_the_next_good_call_works(device: torch.device, name: str) -> None:
    good = good_arguments(device)
    before = run_all(good)
    call, exception, message = CASES[name]
    with pytest.raises(exception) as raised:
        call(good)
    low, high = good.selection.indices.aminmax()
    expected = message.format(device=good.keys.device, low=int(low), high=int(high))
    assert type(raised.value) is exception
    assert str(raised.value) == expected
    after = run_all(good)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_gradients_are_no_matter_where_none_are_recorded(device: torch.device) -> None:
    good = good_arguments(device)
    with torch.no_grad():
        index = ck.cluster_keys(good.keys.clone().requires_grad_(), num_clusters=5)
    assert not index.centroids.requires_grad
