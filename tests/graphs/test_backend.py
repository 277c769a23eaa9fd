"""What the backend says about itself: statistics, explanation, warnings, and its name."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends import registry

from clusterkv_ops import ClusterKVConfig
from clusterkv_ops.graphs import backend as backend_module
from clusterkv_ops.graphs import clusterkv_backend, named_backend
from tests.graphs.captured import cat_then, inputs_of
from tests.graphs.decoders import BATCH, HEAD_DIM, HEADS, KV_HEADS, LAYERS, CatDecoder
from tests.graphs.models import make, prompt
from tests.graphs.talks import ALL, SMALL, Talk, compiled, plain, tokens

ROOT = Path(__file__).parents[2]
ROW_BYTES = 2 * HEAD_DIM * 4
PROMPT, STEPS = 90, 5


def test_statistics_count_what_happened() -> None:
    talk, backend = compiled("cat", SMALL)
    talk.feed(tokens(PROMPT))
    talk.decode(tokens(STEPS))
    talk.feed(tokens(3))
    stats = backend.stats()
    assert stats.sites_rewritten == stats.graphs * LAYERS
    assert (stats.sites_skipped, stats.store_copies) == (0, 0)
    assert (stats.prefill_calls, stats.extend_calls) == (LAYERS, LAYERS)
    assert (stats.dense_steps, stats.sparse_steps) == (STEPS, STEPS)
    clustered = PROMPT - SMALL.num_sink_tokens
    assert stats.num_clusters == clustered // SMALL.tokens_per_cluster
    assert stats.kv_bytes == LAYERS * BATCH * KV_HEADS * (PROMPT + STEPS + 3) * ROW_BYTES
    dense = sum(BATCH * KV_HEADS * (PROMPT + step) for step in range(1, STEPS + 1))
    always = sum(SMALL.num_sink_tokens + step for step in range(1, STEPS + 1))
    selected = STEPS * SMALL.selected_tokens * HEADS
    assert stats.kv_bytes_read == (dense + BATCH * (always * KV_HEADS + selected)) * ROW_BYTES
    assert stats.index_bytes > 0
    assert stats.hit_rate == 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.graphs = 3  # type: ignore[misc]


def test_the_hit_rate_is_counted_with_offload() -> None:
    talk, backend = compiled("cat", dataclasses.replace(SMALL, offload=True))
    talk.feed(tokens(PROMPT))
    talk.decode(tokens(STEPS))
    stats = backend.stats()
    wanted = stats.recall_hits + stats.recall_misses
    most = STEPS * BATCH * HEADS * SMALL.selected_tokens
    assert STEPS * BATCH * KV_HEADS * SMALL.selected_tokens <= wanted <= most
    assert stats.hit_rate == stats.recall_hits / wanted
    assert 0 < stats.hit_rate < 1


def test_the_explanation_lists_every_site() -> None:
    model = make("llama")
    backend = clusterkv_backend(config=SMALL, inner="eager")
    assert backend.explain() == "no graph was compiled with this backend"
    model.compile(backend=backend)
    model.generate(prompt(1, 60), max_new_tokens=2, do_sample=False)
    lines = [line.split(None, 5) for line in backend.explain().splitlines()]
    assert lines[0] == ["graph", "module", "layer", "queries", "cache", "outcome"]
    layers = model.config.num_hidden_layers
    assert lines[1 : 1 + layers] == [
        ["1", f"model.layers.{i}.self_attn", str(i), "60", "cat", "rewritten"]
        for i in range(layers)
    ]
    assert lines[1 + layers][3] == "1"


def _make_and_forget() -> None:
    clusterkv_backend()
    gc.collect()


def test_a_backend_that_was_never_called_says_so() -> None:
    with pytest.warns(RuntimeWarning, match=r"never called.*use model\.compile\(backend="):
        _make_and_forget()
    script = (
        "import torch\n"
        "from clusterkv_ops.graphs import clusterkv_backend\n"
        "backend = clusterkv_backend(inner='eager')\n"
        "model = torch.compile(torch.nn.Linear(2, 2), backend=backend)\n"
        "{call}"
    )
    for call, is_warned in (("", True), ("model(torch.ones(1, 2))", False)):
        done = subprocess.run(
            [sys.executable, "-c", script.format(call=call)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert ("model.compile(backend=...)" in done.stderr) == is_warned, done.stderr


def test_the_last_compilation_of_a_function_is_announced() -> None:
    backend = clusterkv_backend(inner="eager")
    function = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for size in (2, 3):
                function(torch.ones(size))
        with pytest.warns(RuntimeWarning, match="Dynamo has compiled this function 3 times"):
            function(torch.ones(4))
        function(torch.ones(5))  # uncompiled
    assert backend.stats().graphs == 3


def test_a_dense_decode_over_the_budget_is_announced_once() -> None:
    others = plain("cat")
    others.feed(tokens(PROMPT))
    talk, backend = compiled("cat", SMALL)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            one = talk.again()
            one.cache, one.length = others.cache, PROMPT
            one.feed(tokens(1))
    assert [str(w.message) for w in seen] == [
        "a decode step over 91 tokens, more than the budget of 40, attended densely: the cache "
        "was not built by this backend: its tokens are being clustered"
    ]
    assert backend.stats().dense_steps == 2 * LAYERS


class _MaskedDecoder(CatDecoder):
    """A decoder whose mask hides more than padding and the future."""

    def cached(self, block, query, key, value, position, past):  # type: ignore[no-untyped-def]
        keys, values = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        num_new, kv_len = query.shape[2], keys.shape[2]
        mask = self.visible(torch.arange(kv_len - num_new, kv_len)[:, None], torch.arange(kv_len))
        return block.attend(query, keys, values, attn_mask=mask), (keys, values)

    def visible(self, asking: Tensor, seen: Tensor) -> Tensor:
        raise NotImplementedError


class _WindowDecoder(_MaskedDecoder):
    def visible(self, asking: Tensor, seen: Tensor) -> Tensor:
        return (seen <= asking) & (seen > asking - 64)


class _HoleDecoder(_MaskedDecoder):
    def visible(self, asking: Tensor, seen: Tensor) -> Tensor:
        return (seen <= asking) & (seen != 30)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_WindowDecoder, "the mask is a sliding window"),
        (_HoleDecoder, "the mask hides tokens that are neither padding nor the future"),
    ],
)
def test_a_mask_of_another_kind_stays_dense_and_exact(kind: type[CatDecoder], reason: str) -> None:
    backend = clusterkv_backend(config=SMALL, inner="eager")
    decoder = kind().eval()
    talk, one = Talk(decoder, torch.compile(decoder, backend=backend)), Talk(decoder)
    for each in (talk, one):
        each.feed(tokens(PROMPT))
    with pytest.warns(RuntimeWarning, match=f"attended densely: {reason}"):
        seen = talk.decode(tokens(STEPS))
    torch.testing.assert_close(seen, one.decode(tokens(STEPS)))
    assert backend.stats().sparse_steps == 0


@pytest.fixture
def registered() -> Iterator[None]:
    """The backend under its name, also where the package is not installed."""
    name = "clusterkv"
    is_known = name in torch._dynamo.list_backends(exclude_tags=())
    if not is_known:
        registry.register_backend(backend_module.clusterkv, name=name)
    yield
    if not is_known:
        registry._COMPILER_FNS.pop(name, None)
        registry._BACKENDS.pop(name, None)


def test_the_entry_point_names_the_backend() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'clusterkv = "clusterkv_ops.graphs.backend:clusterkv"' in text


@pytest.mark.usefixtures("registered")
def test_the_backend_is_found_by_name_with_options() -> None:
    options: dict[str, Any] = {"budget": 64, "seed": 5, "inner": "eager"}
    function = cat_then(lambda x: x, enable_gqa=True)
    inputs = inputs_of()
    with torch.no_grad():
        seen = torch.compile(function, backend="clusterkv", options=options)(*inputs)
        torch.testing.assert_close(seen, function(*inputs))
    backend = named_backend(**options)
    assert backend.config == ClusterKVConfig(budget=64, seed=5)
    assert backend.stats().sites_rewritten == 1
    assert named_backend(**options) is backend
    with pytest.raises(Exception, match="unexpected keyword argument 'windows'"):
        torch.compile(function, backend="clusterkv", options={"windows": 3})(*inputs)


def test_aot_eager_is_an_inner_backend() -> None:
    talk, backend = compiled("cat", ALL, inner="aot_eager")
    one = plain("cat")
    parts = [torch.cat([x.feed(tokens(60)), x.decode(tokens(3))], 1) for x in (talk, one)]
    torch.testing.assert_close(*parts, atol=1e-4, rtol=1e-5)
    assert backend.stats().sites_rewritten > 0
