"""transformers' generation modes, compiled with the backend: exact where the budget covers the
context, and equal to the eager oracle where it doesn't."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clusterkv_ops import ClusterKVConfig
from clusterkv_ops.graphs.backend import ClusterKVBackend, clusterkv_backend
from tests.graphs.models import FAMILIES, make, prompt
from tests.graphs.oracle import Oracle

LENGTH = 120
SMALL = ClusterKVConfig(
    budget=48,
    num_sink_tokens=4,
    tokens_per_cluster=8,
    recluster_interval=16,
    clusters_per_interval=2,
    dense_layers=1,
)


def _padded() -> dict[str, Any]:
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :50] = 0
    mask[2, :7] = 0
    return {"inputs": prompt(3, LENGTH), "attention_mask": mask}


MODES: dict[str, Any] = {
    "greedy": lambda: {"inputs": prompt(1, LENGTH)},
    "sampled": lambda: {"inputs": prompt(2, LENGTH), "do_sample": True, "top_k": 20},
    "left-padded batch": _padded,
    "beam": lambda: {"inputs": prompt(1, LENGTH), "num_beams": 3},
    "prompt lookup": lambda: {
        "inputs": prompt(1, 20).repeat(1, LENGTH // 20),
        "prompt_lookup_num_tokens": 4,
    },
    "static cache": lambda: {"inputs": prompt(1, LENGTH), "cache_implementation": "static"},
    "chunked prefill": lambda: {"inputs": prompt(1, LENGTH), "prefill_chunk_size": 33},
}


def _generate(model: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **options}
    tokens: torch.Tensor = model.generate(**settings)
    return tokens


def _compiled(model: Any, config: ClusterKVConfig, inner: Any = "eager") -> ClusterKVBackend:
    torch._dynamo.reset()
    backend = clusterkv_backend(config=config, inner=inner)
    model.compile(backend=backend)
    return backend


@pytest.mark.parametrize("mode", MODES)
def test_a_budget_that_covers_the_context_changes_no_token(mode: str) -> None:
    model = make("llama")
    expected = _generate(model, **MODES[mode]())
    backend = _compiled(model, ClusterKVConfig(budget=4096))
    assert _generate(model, **MODES[mode]()).tolist() == expected.tolist()
    stats = backend.stats()
    assert stats.sites_rewritten > 0
    assert stats.sites_skipped == 0
    assert stats.sparse_steps == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_small_budget_equals_the_eager_oracle(mode: str) -> None:
    oracle = Oracle(SMALL)
    model = make("llama")
    oracle.install(model)
    expected = _generate(model, **MODES[mode]())
    model = make("llama")
    backend = _compiled(model, SMALL)
    assert _generate(model, **MODES[mode]()).tolist() == expected.tolist()
    assert backend.stats().sparse_steps == oracle.sparse_steps
    if mode != "prompt lookup":  # its steps have several queries, but for the odd one
        assert oracle.sparse_steps > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_and_equals_the_oracle(family: str) -> None:
    inputs = _padded()
    model = make(family)
    expected = _generate(model, **inputs)
    _compiled(model, ClusterKVConfig(budget=4096))
    assert _generate(model, **inputs).tolist() == expected.tolist()

    oracle = Oracle(SMALL)
    model = make(family)
    oracle.install(model)
    expected = _generate(model, **inputs)
    model = make(family)
    backend = _compiled(model, SMALL)
    assert _generate(model, **inputs).tolist() == expected.tolist()
    assert backend.stats().sparse_steps == oracle.sparse_steps > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"head_rule": "kv_head"},
        {"offload": True},
        {"offload": True, "recall_steps": 0},
        {"seed": 7},
    ],
    ids=str,
)
def test_every_setting_equals_the_oracle(changes: dict[str, Any]) -> None:
    config = ClusterKVConfig(**{**SMALL.__dict__, **changes})
    model = make("llama")
    Oracle(config).install(model)
    expected = _generate(model, **_padded())
    model = make("llama")
    backend = _compiled(model, config)
    assert _generate(model, **_padded()).tolist() == expected.tolist()
    if config.offload:
        assert backend.stats().recall_misses > 0
        assert (backend.stats().recall_hits > 0) == (config.recall_steps > 0)


@pytest.mark.parametrize("config", [ClusterKVConfig(budget=4096), SMALL], ids=["all", "small"])
def test_a_second_turn_continues_the_cache(config: ClusterKVConfig) -> None:
    def talk(model: Any) -> list[int]:
        first = model.generate(
            prompt(1, LENGTH), max_new_tokens=20, do_sample=False, return_dict_in_generate=True
        )
        longer = torch.cat([first.sequences, prompt(1, 30, seed=1)], 1)
        past = first.past_key_values
        second = _generate(model, inputs=longer, past_key_values=past)
        tokens: list[int] = second[0].tolist()
        return tokens

    model = make("llama")
    if config is SMALL:
        Oracle(SMALL).install(model)
    expected = talk(model)
    model = make("llama")
    backend = _compiled(model, config)
    assert talk(model) == expected
    assert backend.stats().extend_calls > 0
    assert (backend.stats().sparse_steps > 0) == (config is SMALL)
    assert backend.stats().store_copies == 0


@pytest.mark.parametrize("config", [ClusterKVConfig(budget=4096), SMALL], ids=["all", "small"])
def test_inductor_agrees_with_eager(config: ClusterKVConfig) -> None:
    model = make("llama")
    _compiled(model, config)
    expected = _generate(model, **_padded())
    model = make("llama")
    backend = _compiled(model, config, inner="inductor")
    assert _generate(model, **_padded()).tolist() == expected.tolist()
    assert backend.stats().sites_rewritten > 0
