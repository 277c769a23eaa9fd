"""The traps that other implementations of this family fell into, where they show in a whole model.

COVERED names the tests of those that are met elsewhere.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterkv_ops.graphs import clusterkv_backend
from tests.graphs.decoders import BATCH, HEAD_DIM, KV_HEADS, LAYERS
from tests.graphs.models import make, prompt
from tests.graphs.talks import SMALL, compiled, tokens

ROOT = Path(__file__).parents[2]
COVERED = {
    "a ranking that does not sort, above 256 clusters": (
        "ops/test_selection.py",
        "test_ranking_equals_topk_for_any_number_of_clusters",
    ),
    "cluster counts limited by a block": (
        "ops/test_clustering.py",
        "test_any_number_of_clusters_works",
    ),
    "a token counted twice, or an index off by one": (
        "graphs/test_decoders.py",
        "test_a_small_budget_equals_the_eager_oracle",
    ),
    "sums of keys in half precision": (
        "ops/test_clustering.py",
        "test_sums_are_not_taken_in_half_precision",
    ),
    "growth and clustering past the prompt": ("graphs/test_long.py", "test_a_thousand_tokens"),
}


@pytest.mark.parametrize("trap", COVERED)
def test_a_trap_is_covered(trap: str) -> None:
    path, name = COVERED[trap]
    assert f"def {name}(" in (ROOT / "tests" / path).read_text()


def _logits(changes: dict[str, Any], name: str = "cat") -> torch.Tensor:
    """Logits of a prompt and 60 steps: three windows are clustered, the cache is cropped once."""
    talk, backend = compiled(name, dataclasses.replace(SMALL, **changes))
    parts = [talk.feed(tokens(90)), talk.decode(tokens(60, seed=1))]
    talk.rewind(120)
    parts.append(talk.decode(tokens(20, seed=2)))
    assert backend.stats().sparse_steps == 80
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", ["cat", "gpt-fast"])
def test_settings_of_speed_do_not_change_a_bit(name: str) -> None:
    expected = _logits({}, name)
    for changes in (
        {"offload": True},
        {"offload": True, "recall_steps": 0},
        {"offload": True, "recall_steps": 3},
        {"async_clustering": True},
    ):
        assert torch.equal(_logits(changes, name), expected), changes


def test_a_second_request_does_not_use_the_slots_of_the_first() -> None:
    config = dataclasses.replace(SMALL, offload=True)
    alone = []
    for seed in (0, 1):
        talk, _ = compiled("cat", config)
        talk.feed(tokens(90, seed))
        alone.append(talk.decode(tokens(10, seed)))
    first, _ = compiled("cat", config)
    second = first.again()
    first.feed(tokens(90, 0))
    second.feed(tokens(90, 1))
    steps: list[list[torch.Tensor]] = [[], []]
    for i in range(10):
        for seed, talk in enumerate((first, second)):
            steps[seed].append(talk.feed(tokens(10, seed)[:, i : i + 1]))
    for seen, expected in zip(steps, alone, strict=True):
        assert torch.equal(torch.cat(seen, 1), expected)


@pytest.mark.parametrize("name", ["cat", "gpt-fast"])
def test_keys_are_stored_once_for_each_kv_head(name: str) -> None:
    talk, backend = compiled(name, SMALL)
    talk.feed(tokens(90))
    talk.decode(tokens(3))
    held = 93 if name == "cat" else talk.decoder.causal.shape[0]
    assert backend.stats().kv_bytes == LAYERS * BATCH * KV_HEADS * held * 2 * HEAD_DIM * 4


def test_a_padded_row_generates_what_it_generates_alone() -> None:
    length, padding = 100, 33
    inputs, mask = prompt(2, length), torch.ones(2, length, dtype=torch.long)
    mask[1, :padding] = 0
    model = make("llama")
    backend = clusterkv_backend(config=SMALL, inner="eager")
    model.compile(backend=backend)

    def generate(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
        options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
        tokens: torch.Tensor = model.generate(ids, attention_mask=mask, **options)
        rows: list[list[int]] = tokens[:, -30:].tolist()
        return rows

    together = generate(inputs, mask)
    assert together[0] == generate(inputs[:1], mask[:1])[0]
    assert together[1] == generate(inputs[1:, padding:], mask[1:, padding:])[0]
    assert backend.stats().sparse_steps == 3 * 29 * (model.config.num_hidden_layers - 1)
