"""Hand-written decoders of every cache idiom: exact where the budget covers the context, equal to
the eager oracle where it doesn't."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from clusterkv_ops import ClusterKVConfig
from clusterkv_ops.graphs.backend import ClusterKVBackend, clusterkv_backend
from tests.graphs.decoders import DECODERS, Decoder, Talk, make, tokens
from tests.graphs.oracle import Oracle

SMALL = ClusterKVConfig(
    budget=40,
    num_sink_tokens=4,
    tokens_per_cluster=8,
    recluster_interval=16,
    clusters_per_interval=2,
    dense_layers=1,
)
ALL = ClusterKVConfig(budget=4096)


def _compiled(
    decoder: Decoder, config: ClusterKVConfig, inner: Any = "eager"
) -> tuple[Talk, ClusterKVBackend]:
    torch._dynamo.reset()
    backend = clusterkv_backend(config=config, inner=inner)
    return Talk(decoder, torch.compile(decoder, backend=backend)), backend


def _conversation(talk: Talk) -> list[Tensor]:
    """Logits of a prompt, a chunk, decode steps, decode steps after a rewind, a second request."""
    seen = [talk.feed(tokens(100)), talk.feed(tokens(17, seed=1))]
    seen.append(talk.decode(tokens(24, seed=2)))
    talk.rewind(130)
    seen.append(talk.decode(tokens(9, seed=3)))
    talk.length, talk.cache = 0, talk.decoder.empty()
    seen += [talk.feed(tokens(90, seed=4)), talk.decode(tokens(12, seed=5))]
    return seen


@cache
def _tolerance(name: str) -> float:
    """Twice the error of float32 on its own: uncompiled, against float64."""
    exact = _conversation(Talk(make(name).double()))
    return 2 * _difference(_conversation(Talk(make(name))), exact)


def _difference(seen: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(seen, expected, strict=True))


@pytest.mark.parametrize("name", DECODERS)
def test_a_budget_that_covers_the_context_changes_nothing(name: str) -> None:
    expected = _conversation(Talk(make(name)))
    talk, backend = _compiled(make(name), ALL)
    assert _difference(_conversation(talk), expected) <= _tolerance(name)
    stats = backend.stats()
    assert stats.sites_rewritten > 0
    assert stats.dense_steps > 0
    assert stats.sparse_steps == 0


@pytest.mark.parametrize("name", [n for n in DECODERS if n != "cat, none at first"])
def test_a_small_budget_equals_the_eager_oracle(name: str) -> None:
    reference, oracle = make(name), Oracle(SMALL)
    for block in reference.layers:
        block.attention = oracle
    expected = _conversation(Talk(reference))
    talk, backend = _compiled(make(name), SMALL)
    assert _difference(_conversation(talk), expected) <= _tolerance(name)
    assert backend.stats().sparse_steps == oracle.sparse_steps > 0
    assert backend.stats().sites_skipped == 0


@pytest.mark.parametrize("name", ["cat", "gpt-fast", "slice"])
@pytest.mark.parametrize("config", [ALL, SMALL], ids=["all", "small"])
def test_inductor_agrees_with_eager(name: str, config: ClusterKVConfig) -> None:
    expected = _conversation(_compiled(make(name), config)[0])
    talk, backend = _compiled(make(name), config, inner="inductor")
    assert _difference(_conversation(talk), expected) <= _tolerance(name)
    assert (backend.stats().sparse_steps > 0) == (config is SMALL)
