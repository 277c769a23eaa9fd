"""Bad settings and bad calls of a compiled decoder: the exact error, and the next good call works.

The operators' own table is tests/ops/test_bad_input.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from clusterkv_ops import ClusterKVConfig
from clusterkv_ops.graphs import clusterkv_backend, named_backend
from clusterkv_ops.sequence import Sequence
from tests.graphs.decoders import LAYERS, VOCABULARY
from tests.graphs.talks import ALL, SMALL, Talk, compiled, difference, plain, tokens, tolerance

pytestmark = pytest.mark.filterwarnings("ignore:a clusterkv backend was made and never called")

SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 8}, ValueError, "budget: expected at least num_sink_tokens + 1 = 17, got 8"),
    (
        {"budget": 16, "num_sink_tokens": 16},
        ValueError,
        "budget: expected at least num_sink_tokens + 1 = 17, got 16",
    ),
    ({"budget": "64"}, TypeError, "budget: expected an int, got '64'"),
    ({"budget": 64.0}, TypeError, "budget: expected an int, got 64.0"),
    ({"budget": True}, TypeError, "budget: expected an int, got True"),
    ({"num_sink_tokens": -1}, ValueError, "num_sink_tokens: expected at least 0, got -1"),
    ({"tokens_per_cluster": 0}, ValueError, "tokens_per_cluster: expected at least 1, got 0"),
    ({"recluster_interval": 0}, ValueError, "recluster_interval: expected at least 1, got 0"),
    (
        {"clusters_per_interval": 321},
        ValueError,
        "clusters_per_interval: expected at most recluster_interval = 320, got 321",
    ),
    ({"dense_layers": -1}, ValueError, "dense_layers: expected at least 0, got -1"),
    ({"max_iter": 0}, ValueError, "max_iter: expected at least 1, got 0"),
    ({"seed": -1}, ValueError, "seed: expected at least 0, got -1"),
    ({"recall_steps": -1}, ValueError, "recall_steps: expected at least 0, got -1"),
    ({"offload": 1}, TypeError, "offload: expected a bool, got 1"),
    ({"async_clustering": None}, TypeError, "async_clustering: expected a bool, got None"),
    (
        {"head_rule": "token"},
        ValueError,
        "head_rule: expected one of query_head, kv_head, got 'token'",
    ),
    (
        {"windows": 3},
        TypeError,
        "ClusterKVConfig.__init__() got an unexpected keyword argument 'windows'",
    ),
    (
        {"inner": "tvm"},
        ValueError,
        "inner: expected one of inductor, aot_eager, eager, got 'tvm'",
    ),
    (
        {"config": ALL, "seed": 1},
        ValueError,
        "config: expected no other setting beside it, got some",
    ),
    (
        {"config": ALL, "budget": 64},
        ValueError,
        "config: expected no other setting beside it, got some",
    ),
    (
        {"config": {"budget": 64}},
        TypeError,
        "config: expected a ClusterKVConfig, got dict",
    ),
]


@pytest.mark.parametrize(("settings", "error", "message"), SETTINGS, ids=lambda x: str(x)[:40])
def test_a_bad_setting_is_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    for make in (clusterkv_backend, named_backend):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            make(**settings)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(AttributeError, match="cannot assign to field 'budget'"):
        ClusterKVConfig().budget = 5  # type: ignore[misc]


def _assert_next_call_works(talk: Talk) -> None:
    """Another conversation, within the budget, is exact."""
    one = plain("cat")
    parts = []
    for each in (talk.again(), one):
        parts.append([each.feed(tokens(30, seed=8)), each.decode(tokens(4, seed=9))])
    assert difference(*parts) <= tolerance("cat")


def test_a_batch_of_another_size_is_refused() -> None:
    talk, _ = compiled("cat", ALL)
    talk.feed(tokens(50))
    talk.decode(tokens(3))
    cache, length = talk.cache, talk.length
    with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension"):
        talk.feed(tokens(1, batch=3))
    one = plain("cat")
    one.feed(tokens(50))
    one.decode(tokens(3))
    talk.cache, talk.length = cache, length
    parts = [[each.decode(tokens(5, seed=4))] for each in (talk, one)]
    assert difference(*parts) <= tolerance("cat")
    _assert_next_call_works(talk)


@pytest.mark.parametrize("name", ["cat", "cat, alibi"])
def test_an_empty_prompt_is_no_error(name: str) -> None:
    talk, one = compiled(name, SMALL)[0], plain(name)
    parts = []
    for each in (talk, one):
        parts.append([each.feed(tokens(0)), each.feed(tokens(30)), each.decode(tokens(2))])
    assert parts[0][0].shape == (2, 0, VOCABULARY)
    assert difference(parts[0][1:], parts[1][1:]) <= tolerance(name)


def test_training_runs_the_model_as_it_is() -> None:
    talk, backend = compiled("cat", SMALL)
    one = plain("cat")
    grads = []
    for each in (talk, one):
        logits, _ = each.run(tokens(60), 0, each.cache)
        logits.square().mean().backward()
        grads.append(each.decoder.layers[1].qkv.weight.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert backend.stats().sites_rewritten == 0
    assert "gradients are on: call the model under torch.no_grad()" in backend.explain()
    _assert_next_call_works(talk)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("offload", [False, True], ids=["on device", "offload"])
def test_keys_that_are_no_numbers_do_no_harm(bad: float, offload: bool) -> None:
    config = ClusterKVConfig(**{**SMALL.__dict__, "offload": offload})
    talk, backend = compiled("cat", config)
    embedding = talk.decoder.embedding.weight.data
    kept = embedding[7].clone()
    embedding[7] = bad
    prompt = tokens(90)
    prompt[0, 30:60] = 7
    prompt[1][prompt[1] == 7] = 8
    talk.feed(prompt)
    logits = talk.decode(torch.full((2, 20), 3))
    assert backend.stats().sparse_steps > 0
    embedding[7] = kept
    assert logits[1].isfinite().logical_not().sum() == 20  # the vocabulary's own column of 7
    _assert_next_call_works(talk)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_call_that_failed_can_be_repeated(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    talk, backend = compiled("cat", SMALL)
    expected = compiled("cat", SMALL)[0]
    for each in (talk, expected):
        each.feed(tokens(90))
        each.decode(tokens(17, seed=1))  # the next window is almost full
    attend = Sequence.attend

    def failing(self: Sequence, *args: Any, **options: Any) -> Any:
        result = attend(self, *args, **options)
        if self.layer == layer:
            raise MemoryError("no room")
        return result

    before = [key.clone() for key, _ in talk.cache]
    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "attend", failing)
        with pytest.raises(MemoryError, match="no room"):
            talk.feed(tokens(1, seed=2))
    for (key, _), content in zip(talk.cache, before, strict=True):
        assert torch.equal(key, content)
    parts = [each.decode(tokens(30, seed=2)) for each in (talk, expected)]
    assert torch.equal(*parts)
    assert backend.stats().store_copies == 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_clustering_that_failed_is_reported_and_done_again(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ClusterKVConfig(**{**SMALL.__dict__, "async_clustering": is_async})
    talk, backend = compiled("cat", config)
    talk.feed(tokens(90))
    talk.decode(tokens(5))

    one = talk.again()
    with monkeypatch.context() as patch:
        patch.setattr("clusterkv_ops.sequence.ops", _Failing())
        with pytest.raises(MemoryError, match="no room"):
            _request(one)
    if is_async:
        before = backend.stats().sparse_steps
        one.decode(tokens(30))
        assert backend.stats().sparse_steps > before
    _assert_next_call_works(talk)


def _request(talk: Talk) -> None:
    talk.feed(tokens(90))
    talk.decode(tokens(1))


class _Failing:
    """The operators, where clustering fails."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.clusterkv, name)

    def extend_index_(self, *_: Any) -> None:
        raise MemoryError("no room")


def test_a_place_outside_of_the_buffer_is_an_error_of_the_model() -> None:
    talk, _ = compiled("index_copy", ALL)
    talk.feed(tokens(50))
    talk.decode(tokens(2))
    one = plain("index_copy")
    one.feed(tokens(50))
    one.decode(tokens(2))
    talk.length = 511
    talk.feed(tokens(1))
    talk.length = 512
    with pytest.raises(IndexError):
        talk.feed(tokens(1))
    talk.rewind(52)
    parts = [[each.decode(tokens(5, seed=4))] for each in (talk, one)]
    assert difference(*parts) <= tolerance("index_copy")
