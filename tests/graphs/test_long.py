"""A thousand tokens: the store grows, windows are clustered, nothing is compiled or kept twice."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import StoppingCriteria, StoppingCriteriaList

from clusterkv_ops.graphs import clusterkv_backend
from clusterkv_ops.sequence import Sequence
from clusterkv_ops.store import KVStore
from tests.graphs.models import make, prompt

PROMPT, NEW_TOKENS, WARM_UP, LAYERS = 2048, 1000, 4, 2


def _model() -> Any:
    like = make("llama").config.to_dict()
    changes = {"num_hidden_layers": LAYERS, "max_position_embeddings": 4096}
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**like, **changes})).eval()
    model.generation_config.eos_token_id = None
    return model


class Watch(StoppingCriteria):  # type: ignore[misc]
    """Measures at some steps of a generation; never stops it."""

    def __init__(self, *at: int) -> None:
        self.steps, self.at = 0, at
        self.traced_bytes: list[int] = []
        self.num_tensors: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps in self.at:
            gc.collect()
            if not tracemalloc.is_tracing():
                tracemalloc.start()
            self.traced_bytes.append(tracemalloc.get_traced_memory()[0])
            found = gc.get_objects()
            self.num_tensors.append(sum(issubclass(type(x), torch.Tensor) for x in found))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _counted(patch: pytest.MonkeyPatch, owner: type, name: str) -> list[int]:
    """The calls of a method, one entry each."""
    calls: list[int] = []
    method = getattr(owner, name)

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return method(self, *args, **options)

    patch.setattr(owner, name, counting)
    return calls


@pytest.mark.slow
def test_a_thousand_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    growths = _counted(monkeypatch, KVStore, "_grow")
    clusterings = _counted(monkeypatch, Sequence, "_start_clustering")
    model = _model()
    backend = clusterkv_backend(budget=256, dense_layers=1, inner="aot_eager")
    model.compile(backend=backend)

    def generate(num_tokens: int, **options: Any) -> torch.Tensor:
        tokens: torch.Tensor = model.generate(
            prompt(1, PROMPT), max_new_tokens=num_tokens, do_sample=False, **options
        )
        return tokens

    warm = generate(WARM_UP)
    graphs, sparse_steps = backend.stats().graphs, backend.stats().sparse_steps
    clusterings.clear()
    watch = Watch(NEW_TOKENS - 150, NEW_TOKENS - 100, NEW_TOKENS)
    tokens = generate(NEW_TOKENS, stopping_criteria=StoppingCriteriaList([watch]))
    tracemalloc.stop()

    assert tokens.shape == (1, PROMPT + NEW_TOKENS)
    assert torch.equal(tokens[:, : PROMPT + WARM_UP], warm)
    assert backend.stats().graphs == graphs
    assert backend.stats().sparse_steps - sparse_steps == NEW_TOKENS - 1
    assert len(clusterings) >= 1 + 3  # the prompt, then windows
    assert len(growths) >= 2 * LAYERS
    assert watch.num_tensors[2] <= watch.num_tensors[1] + 8
    # torch itself allocates some 400 bytes a step; a kept tensor shows above, a kept buffer here
    assert watch.traced_bytes[2] - watch.traced_bytes[1] < 100 * 1024
    assert backend.stats().kv_bytes == backend.stats().index_bytes == 0


def test_the_memory_held_is_the_cache_and_little_more() -> None:
    model = _model()
    backend = clusterkv_backend(budget=256, dense_layers=1, inner="eager")
    model.compile(backend=backend)
    with torch.no_grad():
        cache = model(prompt(1, PROMPT), use_cache=True).past_key_values
        stats = backend.stats()
        heads, head_dim = model.config.num_key_value_heads, 16
        assert stats.kv_bytes == LAYERS * 2 * heads * PROMPT * head_dim * 4
        storages = {layer.keys.untyped_storage() for layer in cache.layers}
        held = sum(storage.nbytes() for storage in storages)
    assert len(storages) == LAYERS
    assert held <= stats.kv_bytes * (PROMPT + 256 + 64) / PROMPT
