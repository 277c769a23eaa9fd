"""Milliseconds per token of a whole model: transformers' caches, and ours, dense and sparse.

    python benchmarks/decode.py

The model has SmolLM2-135M's shapes and random weights, which cost what trained ones cost. Its
cache is filled with random keys that gather around L / 80 directions, instead of by a prompt of
32k tokens; the backend copies and clusters such a cache in its first steps, which are not timed.
Every way decodes from a cache of its own, in turns: a round gives each way a few tokens. Dynamo is
told that the caches grow, as it finds out by itself at the second token.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from interleaved import RESULTS, interleaved, markdown_table, medians, minima, save
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from clusterkv_ops.graphs.backend import clusterkv_backend
from clusterkv_ops.profiling.demo import best_dtype

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARM_UP = 4  # compiles, adopts the cache, clusters it
FLOOR_CONTEXT = 64
TITLES = {
    "floor": "DynamicCache, 64 tokens of context",
    "dynamic": "(a) transformers, DynamicCache",
    "static": "(b) transformers, StaticCache",
    "dense": "(c) our backend, budget over the context",
    "sparse": "(d) our backend, sparse",
}


def make_model(num_layers: int, dtype: torch.dtype) -> Any:
    """SmolLM2-135M's shapes, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=131072,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def twin(model: Any) -> Any:
    """A model of its own for Dynamo, with the same parameters in the same memory."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def clustered_keys(config: Any, kv_len: int, dtype: torch.dtype, seed: int) -> Tensor:
    """`[1, Hkv, kv_len, D]`, tokens around L / 80 directions per head."""
    generator = torch.Generator().manual_seed(seed)
    heads, head_dim = config.num_key_value_heads, config.head_dim
    centers = torch.randn(heads, max(1, kv_len // 80), head_dim, generator=generator)
    near = torch.randint(centers.shape[1], (heads, kv_len), generator=generator)
    noise = torch.randn(heads, kv_len, head_dim, generator=generator)
    keys = centers.gather(1, near[..., None].expand(-1, -1, head_dim)) + 0.7 * noise
    return keys.to(dtype)[None]


def filled(cache: Any, config: Any, kv_len: int, dtype: torch.dtype) -> Any:
    """The cache with `kv_len` tokens in every layer."""
    for layer in range(config.num_hidden_layers):
        keys = clustered_keys(config, kv_len, dtype, seed=layer)
        cache.update(keys, keys.flip(-1).contiguous(), layer)
        if isinstance(cache, DynamicCache):
            torch._dynamo.maybe_mark_dynamic(cache.layers[layer].keys, 2)
            torch._dynamo.maybe_mark_dynamic(cache.layers[layer].values, 2)
    return cache


def decoder(model: Any, cache: Any) -> Callable[[], None]:
    """A function that decodes one more token."""
    is_new = "cache" in inspect.signature(model.forward).parameters
    state = {"token": 1}

    @torch.no_grad()
    def step() -> None:
        ids = torch.tensor([[state["token"]]])
        past = {"cache" if is_new else "past_key_values": cache}
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **past)
        state["token"] = int(output.logits[0, -1].argmax())

    return step


def compiled_models(model: Any, budget: int, wanted: list[str]) -> dict[str, tuple[Any, Any]]:
    """Each way's model and backend. A budget of 2^30 covers any context."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in wanted:
        backend: Any = "inductor"
        if name in ("dense", "sparse"):
            backend = clusterkv_backend(2**30 if name == "dense" else budget)
        if name == "floor":
            found[name] = found["dynamic"]  # the same compiled code
            continue
        found[name] = (twin(model), backend)
        found[name][0].compile(backend=backend)
    return found


def measure(
    models: dict[str, tuple[Any, Any]], kv_len: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One context: medians of every way, and what the sparse one holds."""
    steps = {}
    room = WARM_UP + arguments.rounds * arguments.steps + 1
    for name, (model, _) in models.items():
        length = FLOOR_CONTEXT if name == "floor" else kv_len
        is_static = name == "static"
        kind = {"max_cache_len": length + room} if is_static else {}
        cache = (StaticCache if is_static else DynamicCache)(config=model.config, **kind)
        steps[name] = decoder(model, filled(cache, model.config, length, model.dtype))
        for _ in range(WARM_UP):
            steps[name]()
        print(f"{kv_len}: {TITLES[name]} is warm", flush=True)
    before = models["sparse"][1].stats() if "sparse" in models else None
    times = interleaved(steps, rounds=arguments.rounds, calls=arguments.steps)
    result: dict[str, Any] = {"context": kv_len, "ms_per_token": medians(times)}
    result["min_ms_per_token"] = minima(times)
    if before is not None:
        after = models["sparse"][1].stats()
        num_tokens = arguments.rounds * arguments.steps
        result["sparse"] = {
            "sparse_steps": after.sparse_steps - before.sparse_steps,
            "dense_steps": after.dense_steps - before.dense_steps,
            "kv_bytes_per_token": (after.kv_bytes_read - before.kv_bytes_read) / num_tokens,
            "index_pct_of_kv": 100 * after.index_bytes / after.kv_bytes,
            "num_clusters": after.num_clusters,
        }
    return result


def table(results: list[dict[str, Any]]) -> str:
    """A row a way; how many times faster than (a) it is."""
    head = ["ms per token (median)"]
    for result in results:
        head += [f"{result['context'] // 1024}k", "(a) / this"]
    rows = []
    for name in results[0]["ms_per_token"]:
        row = [TITLES[name]]
        for result in results:
            ms = result["ms_per_token"]
            row += [f"{ms[name]:.1f}", f"{ms['dynamic'] / ms[name]:.2f}x"]
        rows.append(row)
    return markdown_table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="tokens of a way in one round")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 if the CPU computes in it")
    parser.add_argument("--ways", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # the ways share transformers' code objects
    warnings.filterwarnings("ignore", message="a decode step over")  # the one that adopts
    dtype = DTYPES[arguments.dtype] if arguments.dtype else best_dtype("cpu")
    wanted = [
        "dynamic",
        *(name for name in TITLES if name in arguments.ways and name != "dynamic"),
    ]
    models = compiled_models(make_model(arguments.layers, dtype), arguments.budget, wanted)
    results = [measure(models, kv_len, arguments) for kv_len in arguments.contexts]
    title = (
        f"# Decoding, {arguments.layers} layers of SmolLM2-135M's shapes, "
        f"{str(dtype).removeprefix('torch.')}, budget {arguments.budget:,}"
    )
    held = "; ".join(
        f"{r['context'] // 1024}k: {r['sparse']['kv_bytes_per_token'] / 1e6:.1f} MB of KV read a "
        f"token, index {r['sparse']['index_pct_of_kv']:.1f} % of the KV"
        for r in results
        if "sparse" in r
    )
    settings = {"layers": arguments.layers, "dtype": str(dtype), "budget": arguments.budget}
    numbers = {"settings": settings, "contexts": results}
    save("decode", arguments.output, numbers, f"{title}\n\n{table(results)}\n\n(d) {held}")


if __name__ == "__main__":
    main()
