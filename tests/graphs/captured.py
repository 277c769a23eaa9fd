"""Small functions with attention in them, as Dynamo captures them.

`q` [B, Hq, n, D] asks, `pk` and `pv` are the past keys and values (or the buffers `kb`, `vb`), `k`
and `v` the new ones, `pos` their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention as sdpa

from clusterkv_ops.graphs.sites import Site, find_sites

B, HQ, HKV, T, N, D = 2, 4, 2, 12, 1, 8
GROUP = HQ // HKV


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def inputs_of(layout: str = "BHTD", *, heads: int = HKV, head_dim: int = D) -> list[Tensor]:
    """q, pk, pv, k, v; the cached ones in a layout."""
    sizes = {"B": B, "H": heads, "D": head_dim}
    past, new = ([{**sizes, "T": t}[letter] for letter in layout] for t in (T, N))
    return [
        random(B, HQ, N, head_dim),
        *(random(*past).add_(i) for i in (0, 1)),
        *(random(*new).add_(i) for i in (2, 3)),
    ]


def captured(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """The one graph that Dynamo makes of a function."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return graphs[0]


def site_of(function: Callable[..., Any], *inputs: Any) -> Site:
    with torch.no_grad():
        (site,) = find_sites(captured(function, *inputs).graph)
    return site


def cat(pk: Tensor, pv: Tensor, k: Tensor, v: Tensor, dim: int = 2) -> tuple[Tensor, Tensor]:
    return torch.cat([pk, k], dim), torch.cat([pv, v], dim)


def cat_then(views: Callable[[Tensor], Tensor], dim: int = 2, **options: Any) -> Any:
    """A decoder with a `cat` cache that attends to `views` of it."""

    def function(q: Tensor, *cached: Tensor) -> tuple[Tensor, ...]:
        keys, values = cat(*cached, dim=dim)
        return sdpa(q, views(keys), views(values), **options), keys, values

    return function


def repeated(x: Tensor) -> Tensor:
    """transformers' repeat_kv."""
    batch, heads, kv_len, head_dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, GROUP, kv_len, head_dim)
    return x.reshape(batch, heads * GROUP, kv_len, head_dim)


def masked(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    keys, values = cat(pk, pv, k, v)
    return sdpa(q, keys, values, mask, enable_gqa=True), keys, values
