"""Hand-written decoders of every cache idiom: exact where the budget covers the context, equal to
the eager oracle where it doesn't."""

from __future__ import annotations

import pytest

from clusterkv_ops import ClusterKVConfig
from tests.graphs.decoders import DECODERS
from tests.graphs.talks import (
    ALL,
    SMALL,
    compiled,
    conversation,
    difference,
    plain,
    sparse,
    tolerance,
)


@pytest.mark.parametrize("name", DECODERS)
def test_a_budget_that_covers_the_context_changes_nothing(name: str) -> None:
    expected = conversation(plain(name))
    talk, backend = compiled(name, ALL)
    assert difference(conversation(talk), expected) <= tolerance(name)
    stats = backend.stats()
    assert stats.sites_rewritten > 0
    assert stats.dense_steps > 0
    assert stats.sparse_steps == 0


@pytest.mark.parametrize("name", [n for n in DECODERS if n != "cat, none at first"])
def test_a_small_budget_equals_the_eager_oracle(name: str) -> None:
    reference, oracle = sparse(name, SMALL)
    expected = conversation(reference)
    talk, backend = compiled(name, SMALL)
    assert difference(conversation(talk), expected) <= tolerance(name)
    assert backend.stats().sparse_steps == oracle.sparse_steps > 0
    assert backend.stats().sites_skipped == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"), [("cat", ALL), ("cat", SMALL), ("slice", SMALL), ("gpt-fast", SMALL)]
)
def test_inductor_agrees_with_eager(name: str, config: ClusterKVConfig) -> None:
    expected = conversation(compiled(name, config)[0])
    talk, backend = compiled(name, config, inner="inductor")
    assert difference(conversation(talk), expected) <= tolerance(name)
    assert (backend.stats().sparse_steps > 0) == (config is SMALL)
