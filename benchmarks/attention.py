"""One decode step's attention alone: our operator against what PyTorch offers.

    python benchmarks/attention.py

Every way reads the same keys, values and query; caches are cold (other memory is touched before
each call), as they are in a model whose layers take turns. "Dense" attends to all tokens, "sparse"
to a budget of them at random places. `index_select` is given to PyTorch for one choice a KV head,
the form that suits it best.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from interleaved import RESULTS, interleaved, markdown_table, medians, minima, save
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from clusterkv_ops import cluster_keys

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = {"SmolLM2-135M": (3, 3, 64), "Llama-3-8B": (8, 4, 128)}  # KV heads, group, head_dim
FLUSHED_BYTES = 64 << 20


class Problem(NamedTuple):
    """Tensors of one step. B = 1, H KV heads, G query heads each, T tokens, D head_dim."""

    query: Tensor  # [1, H * G, 1, D]
    keys: Tensor  # [1, H, T, D], contiguous
    values: Tensor
    stored_keys: Tensor  # [1, H, T, D], views of the store: a token's K and V side by side
    stored_values: Tensor
    per_head: Tensor  # [1, H * G, S] int32, tokens each query head selected
    per_group: Tensor  # [1, H, S] int32


def make_problem(
    kv_heads: int, group: int, head_dim: int, kv_len: int, budget: int, dtype: torch.dtype
) -> Problem:
    generator = torch.Generator().manual_seed(0)
    store = torch.randn(kv_len, 1, kv_heads, 2, head_dim, generator=generator).to(dtype)
    stored_keys, stored_values = store.permute(3, 1, 2, 0, 4)
    query = torch.randn(1, kv_heads * group, 1, head_dim, generator=generator).to(dtype)
    scores = torch.rand(1, kv_heads * group, kv_len, generator=generator)
    chosen = scores.topk(min(budget, kv_len), -1).indices.int()
    keys, values = stored_keys.contiguous(), stored_values.contiguous()
    per_group = chosen[:, ::group].contiguous()
    return Problem(query, keys, values, stored_keys, stored_values, chosen, per_group)


def ours(problem: Problem, indices: Tensor, spans: Tensor) -> Tensor:
    query, keys, values = problem.query, problem.stored_keys, problem.stored_values
    scale = query.shape[-1] ** -0.5
    out: Tensor = torch.ops.clusterkv.selected_attention(
        query, keys, values, indices, spans, None, None, None, None, scale
    )[0]
    return out


def folded(problem: Problem, keys: Tensor, values: Tensor) -> Tensor:
    """SDPA whose query rows are the heads of a group: K and V are read once."""
    _, num_kv_heads, _, head_dim = keys.shape
    query = problem.query.view(1, num_kv_heads, -1, head_dim)
    return scaled_dot_product_attention(query, keys, values).view(problem.query.shape)


def gathered(problem: Problem, rows: Tensor) -> Tensor:
    """index_select of the chosen rows, then folded SDPA. `rows` `[H * S]` of `[H * T, D]`."""
    _, num_kv_heads, _, head_dim = problem.keys.shape
    keys = problem.keys.view(-1, head_dim).index_select(0, rows)
    values = problem.values.view(-1, head_dim).index_select(0, rows)
    shape = (1, num_kv_heads, -1, head_dim)
    return folded(problem, keys.view(shape), values.view(shape))


def ways(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    kv_len, num_kv_heads = problem.keys.shape[2], problem.keys.shape[1]
    everything = torch.tensor([[[0, kv_len], [kv_len, kv_len]]], dtype=torch.int32)
    nowhere = torch.zeros(1, 2, 2, dtype=torch.int32)
    nothing = problem.per_group[..., :0]
    rows = (problem.per_group + torch.arange(num_kv_heads)[:, None] * kv_len).flatten()
    plain = partial(scaled_dot_product_attention, enable_gqa=True)
    return {
        "dense: SDPA, enable_gqa": partial(plain, problem.query, problem.keys, problem.values),
        "dense: SDPA, folded": partial(folded, problem, problem.keys, problem.values),
        "dense: SDPA, folded, on our store": partial(
            folded, problem, problem.stored_keys, problem.stored_values
        ),
        "dense: ours": partial(ours, problem, nothing, everything),
        "sparse: index_select + SDPA": partial(gathered, problem, rows),
        "sparse: ours, one choice a group": partial(ours, problem, problem.per_group, nowhere),
        "sparse: ours, each head its own": partial(ours, problem, problem.per_head, nowhere),
        "selection: ours": _selection(problem),
    }


def _selection(problem: Problem) -> Callable[[], Tensor]:
    """Ranking the clusters of the same context, one for 80 tokens, and listing their tokens."""
    keys = problem.stored_keys
    index = cluster_keys(keys, num_clusters=keys.shape[2] // 80, max_iter=1)
    budget = problem.per_head.shape[2]
    args = (problem.query, *index, budget, "query_head", 1.0)
    return lambda: torch.ops.clusterkv.select_clusters(*args)[0]


def check(problem: Problem, found: dict[str, Callable[[], Tensor]]) -> None:
    """All ways of one kind must agree, or their times mean nothing."""
    for kind in ("dense", "sparse"):
        outs = [way() for name, way in found.items() if name.startswith(kind)]
        outs = outs[: 2 if kind == "sparse" else None]  # each head's own choice is another sum
        for out in outs[1:]:
            torch.testing.assert_close(out.float(), outs[0].float(), rtol=2e-2, atol=2e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    other = torch.zeros(FLUSHED_BYTES // 4)
    numbers, tables = [], []
    for name, shape in SHAPES.items():
        for dtype in arguments.dtypes:
            columns = {}
            for kv_len in arguments.contexts:
                problem = make_problem(*shape, kv_len, arguments.budget, DTYPES[dtype])
                found = ways(problem)
                check(problem, found)
                times = interleaved(found, rounds=arguments.rounds, between=lambda: other.add_(1))
                columns[kv_len] = medians(times)
                run = {"shape": name, "dtype": dtype, "context": kv_len}
                numbers.append({**run, "ms": columns[kv_len], "min_ms": minima(times)})
            tables.append(table(f"{name}, {dtype}, budget {arguments.budget:,}", columns))
    text = "# Attention of one decode step, ms (median)\n\n" + "\n\n".join(tables)
    save("attention", arguments.output, {"runs": numbers}, text)


def table(title: str, columns: dict[int, dict[str, float]]) -> str:
    """One shape: a row a way, with its ratio to the folded SDPA."""
    rows = []
    for name in next(iter(columns.values())):
        row = [name]
        for ms in columns.values():
            row += [f"{ms[name]:.3f}", f"{ms['dense: SDPA, folded'] / ms[name]:.1f}x"]
        rows.append(row)
    head = [title]
    for kv_len in columns:
        head += [f"{kv_len // 1024}k", "against folded"]
    return markdown_table(head, rows)


if __name__ == "__main__":
    main()
