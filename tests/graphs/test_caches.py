"""Who owns which keys and values: every cache that a user can make continues as it should."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from clusterkv_ops import ClusterKVConfig
from clusterkv_ops.graphs.fingerprint import RowHash, extended, matching_rows
from clusterkv_ops.store import KVStore
from tests.graphs.decoders import LAYERS
from tests.graphs.talks import (
    ALL,
    SMALL,
    Talk,
    compiled,
    difference,
    plain,
    sparse,
    tokens,
    tolerance,
)

BOTH = pytest.mark.parametrize("config", [ALL, SMALL], ids=["all", "small"])


def _request(talk: Talk, seed: int, length: int = 90, steps: int = 20) -> list[Tensor]:
    return [talk.feed(tokens(length, seed)), talk.decode(tokens(steps, seed + 1))]


def _expected(config: ClusterKVConfig) -> Talk:
    """An uncompiled conversation that attends to what `config` says."""
    return plain("cat") if config is ALL else sparse("cat", config)[0]


def _assert_exact(seen: list[Tensor], expected: list[Tensor]) -> None:
    assert difference(seen, expected) <= tolerance("cat")


@pytest.mark.parametrize("name", ["cat", "gpt-fast"])
def test_a_second_request_is_a_new_sequence(name: str) -> None:
    alone = _request(compiled(name, SMALL)[0], seed=7)
    talk, backend = compiled(name, SMALL)
    _request(talk, seed=0, length=120)
    assert torch.equal(torch.cat(_request(talk.again(), seed=7), 1), torch.cat(alone, 1))
    assert backend.stats().sparse_steps > 0


@pytest.mark.parametrize("name", ["cat", "slice"])
def test_interleaved_sequences_do_not_mix(name: str) -> None:
    talk, backend = compiled(name, SMALL)
    talks = [talk, talk.again(), talk.again()]
    alone = [_request(one.again(), seed, 80 + 9 * seed) for seed, one in enumerate(talks)]
    steps = [[one.feed(tokens(80 + 9 * seed, seed))] for seed, one in enumerate(talks)]
    for i in range(20):
        for seed, one in enumerate(talks):
            steps[seed].append(one.feed(tokens(20, seed + 1)[:, i : i + 1]))
    for seen, expected in zip(steps, alone, strict=True):
        assert torch.equal(torch.cat(seen, 1), torch.cat(expected, 1))
    assert backend.stats().store_copies == 0


@BOTH
def test_a_fork_from_an_older_cache_leaves_both_branches_exact(config: ClusterKVConfig) -> None:
    talk, backend = compiled("cat", config)
    _request(talk, seed=0)
    saved = [(k, v) for k, v in talk.cache]
    contents = [k.clone() for k, _ in saved]
    branches = [talk.decode(tokens(20, seed=5))]
    other = talk.again()
    other.cache, other.length = saved, 110
    branches.append(other.decode(tokens(20, seed=6)))
    branches.append(talk.decode(tokens(5, seed=8)))
    assert backend.stats().store_copies == LAYERS
    for (key, _), content in zip(saved, contents, strict=True):
        assert torch.equal(key, content)

    for number, seed in enumerate((5, 6)):
        one = _expected(config)
        _request(one, seed=0)
        _assert_exact([branches[number]], [one.decode(tokens(20, seed))])


@BOTH
def test_a_cropped_cache_is_continued_in_place(config: ClusterKVConfig) -> None:
    talk, backend = compiled("cat", config)
    one = _expected(config)
    for each in (talk, one):
        _request(each, seed=0)
        each.rewind(97)
    _assert_exact([talk.decode(tokens(30, seed=5))], [one.decode(tokens(30, seed=5))])
    assert backend.stats().store_copies == 0


@BOTH
def test_a_cropped_cache_is_copied_while_someone_looks_at_it(config: ClusterKVConfig) -> None:
    talk, backend = compiled("cat", config)
    one = _expected(config)
    for each in (talk, one):
        _request(each, seed=0)
    slices = [key[:, :, 60:] for key, _ in talk.cache]
    contents = [x.clone() for x in slices]
    for each in (talk, one):
        each.rewind(97)
    _assert_exact([talk.decode(tokens(30, seed=5))], [one.decode(tokens(30, seed=5))])
    assert backend.stats().store_copies == LAYERS
    for seen, content in zip(slices, contents, strict=True):
        assert torch.equal(seen, content)


def test_tensors_that_something_else_made_are_copied_once() -> None:
    first, one = plain("cat"), plain("cat")
    for each in (first, one):
        _request(each, seed=0)
    talk, backend = compiled("cat", ALL)
    talk.cache, talk.length = first.cache, first.length
    contents = [k.clone() for k, _ in first.cache]
    _assert_exact([talk.decode(tokens(9, seed=5))], [one.decode(tokens(9, seed=5))])
    assert backend.stats().store_copies == LAYERS
    for (key, _), content in zip(first.cache, contents, strict=True):
        assert torch.equal(key, content)


@pytest.mark.filterwarnings("ignore:a decode step over")
def test_foreign_tokens_are_clustered_after_the_first_step() -> None:
    first = plain("cat")
    _request(first, seed=0)
    talk, backend = compiled("cat", SMALL)
    talk.cache, talk.length = first.cache, first.length
    talk.decode(tokens(1, seed=5))
    assert backend.stats().sparse_steps == 0
    talk.decode(tokens(4, seed=6))
    assert backend.stats().sparse_steps == 4 * (LAYERS - SMALL.dense_layers)
    assert backend.stats().num_clusters > 0


@BOTH
@pytest.mark.parametrize("order", [[1, 0], [0, 0], [1, 0, 1]], ids=str)
def test_reordered_rows_keep_their_clusters(config: ClusterKVConfig, order: list[int]) -> None:
    rows = torch.tensor(order)
    talk, backend = compiled("cat", config)
    one = _expected(config)
    parts = []
    for each in (talk, one):
        _request(each, seed=0)
        before = backend.stats().sparse_steps
        each.cache = [(k[rows], v[rows]) for k, v in each.cache]
        parts.append([each.decode(tokens(9, seed=5, batch=len(order)))])
        if each is talk:
            assert backend.stats().store_copies == LAYERS
            more = backend.stats().sparse_steps - before
            assert more == (9 * (LAYERS - 1) if config is SMALL else 0)
    _assert_exact(*parts)


@pytest.mark.filterwarnings("ignore:a decode step over")
@pytest.mark.parametrize("rows", [slice(1, 2), slice(0, 1)], ids=["last", "first"])
def test_a_batch_may_lose_rows(rows: slice) -> None:
    talk, one = compiled("cat", ALL)[0], plain("cat")
    parts = []
    for each in (talk, one):
        _request(each, seed=0)
        each.cache = [(k[rows], v[rows]) for k, v in each.cache]
        parts.append([each.decode(tokens(9, seed=5, batch=1))])
    _assert_exact(*parts)
    talk, backend = compiled("cat", SMALL)
    _request(talk, seed=0)
    before = backend.stats().sparse_steps
    talk.cache = [(k[rows], v[rows]) for k, v in talk.cache]
    talk.decode(tokens(9, seed=5, batch=1))
    assert backend.stats().sparse_steps > before


def test_a_cache_is_freed_with_the_tensors_of_the_model() -> None:
    talk, backend = compiled("cat", SMALL)
    peaks = []
    for seed in range(20):
        one = talk.again()
        one.feed(tokens(60, seed))
        one.decode(tokens(3, seed))
        storages = [weakref.ref(key.untyped_storage()) for key, _ in one.cache]
        peaks.append(backend.stats().kv_bytes)
        del one
        assert backend.stats().kv_bytes == backend.stats().index_bytes == 0
        assert [storage() for storage in storages] == [None] * LAYERS
    assert len(set(peaks)) == 1


def test_growth_leaves_older_views_true() -> None:
    talk, backend = compiled("cat", ALL)
    one = plain("cat")
    for each in (talk, one):
        _request(each, seed=0)
    saved = [(key, key.clone()) for key, _ in talk.cache]
    parts = [[each.feed(tokens(n, seed=n)) for n in (200, 180)] for each in (talk, one)]
    _assert_exact(*parts)
    assert talk.cache[0][0].untyped_storage() is not saved[0][0].untyped_storage()
    assert backend.stats().store_copies == 0
    for key, content in saved:
        assert torch.equal(key, content)


def test_a_store_grows_by_moving() -> None:
    keys, values = torch.randn(2, 1, 2, 700, 4)
    store = KVStore.like(keys[:, :, :1], 1)
    views = []
    for begin in range(0, 700, 70):
        store.append(keys[:, :, begin : begin + 70], values[:, :, begin : begin + 70])
        views.append(store.views())
    assert len({key.untyped_storage().data_ptr() for key, _ in views}) == 3
    for number, (key, value) in enumerate(views, 1):
        assert torch.equal(key, keys[:, :, : 70 * number])
        assert torch.equal(value, values[:, :, : 70 * number])
        assert key.stride() == views[0][0].stride()


def test_two_threads_keep_their_own_state() -> None:
    talk, _ = compiled("cat", SMALL)
    alone = [_request(talk.again(), seed, 90 + seed) for seed in (1, 2)]
    seen: dict[int, Any] = {}

    def run(seed: int) -> None:
        seen[seed] = _request(talk.again(), seed, 90 + seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for seed, expected in zip((1, 2), alone, strict=True):
        assert torch.equal(torch.cat(seen[seed], 1), torch.cat(expected, 1))


@pytest.mark.parametrize("name", ["cat", "slice", "gpt-fast"])
def test_inference_mode_is_as_good_as_no_grad(name: str) -> None:
    expected = _request(compiled(name, SMALL)[0], seed=0)
    with torch.inference_mode():
        talk, backend = compiled(name, SMALL)
        first = _request(talk, seed=0)
        second = _request(talk.again(), seed=0)
    for seen in (first, second):
        assert torch.equal(torch.cat(seen, 1), torch.cat(expected, 1))
    assert backend.stats().sparse_steps > 0


@pytest.mark.filterwarnings("ignore:a decode step over")
def test_a_buffer_that_someone_else_wrote_is_clustered_anew() -> None:
    others, one = plain("slice"), plain("slice")
    for each in (others, one):
        _request(each, seed=3)
    talk, backend = compiled("slice", SMALL)
    _request(talk, seed=0)
    before = backend.stats().sparse_steps
    for mine, theirs in zip(talk.cache, others.cache, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            a.copy_(b)
    part = talk.decode(tokens(1, seed=5))  # attends densely
    assert difference([part], [one.decode(tokens(1, seed=5))]) <= tolerance("slice")
    assert backend.stats().sparse_steps == before
    talk.decode(tokens(3, seed=6))
    assert backend.stats().sparse_steps == before + 3 * (LAYERS - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_recognised_by_their_content(dtype: torch.dtype) -> None:
    keys = torch.randn(3, 2, 50, 8).to(dtype)
    whole, steps = extended(None, keys), None
    for begin in range(0, 50, 10):
        steps = extended(steps, keys[:, :, begin : begin + 10])
    assert isinstance(whole, RowHash)
    assert isinstance(steps, RowHash)
    assert torch.equal(whole.hashes, steps.hashes)
    rows = torch.tensor([2, 0, 2])
    moved = extended(None, keys[rows])
    assert isinstance(moved, RowHash)
    found = matching_rows(moved, whole)
    assert found is not None
    assert torch.equal(found, rows)
    changed = keys.clone()
    changed[1, 1, 49, 7] += 1
    other = extended(None, changed)
    assert isinstance(other, RowHash)
    assert matching_rows(other, whole) is None
