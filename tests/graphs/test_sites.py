"""Which attention calls are found, and that they do the same when they are rewritten.

The names of tensors are explained in captured.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention as sdpa

from clusterkv_ops.graphs.backend import clusterkv_backend
from clusterkv_ops.graphs.rewrite import copy_of, rewrite_pass
from clusterkv_ops.graphs.sites import find_sites, module_path
from tests.graphs.captured import (
    GROUP,
    HKV,
    HQ,
    B,
    D,
    N,
    T,
    captured,
    cat_then,
    inputs_of,
    masked,
    random,
    repeated,
    site_of,
)

VIEWS: dict[str, tuple[str, Any]] = {
    "grouped heads": ("BHTD", cat_then(lambda x: x, enable_gqa=True)),
    "dim from the end": ("BHTD", cat_then(lambda x: x, dim=-2, enable_gqa=True)),
    "scale": ("BHTD", cat_then(lambda x: x, enable_gqa=True, scale=0.5)),
    "repeat_kv": ("BHTD", cat_then(repeated)),
    "repeat_interleave": ("BHTD", cat_then(lambda x: x.repeat_interleave(GROUP, dim=1))),
    "torch.repeat_interleave": (
        "BHTD",
        cat_then(lambda x: torch.repeat_interleave(x, repeats=GROUP, dim=1)),
    ),
    "unsqueeze, expand, flatten": (
        "BHTD",
        cat_then(lambda x: x.unsqueeze(2).expand(-1, -1, GROUP, -1, -1).flatten(1, 2)),
    ),
    "transpose": ("BTHD", cat_then(lambda x: x.transpose(1, 2), dim=1, enable_gqa=True)),
    "transpose and repeat": (
        "BTHD",
        cat_then(lambda x: x.repeat_interleave(GROUP, 2).transpose(1, 2), dim=1),
    ),
    "permute": ("TBHD", cat_then(lambda x: x.permute(1, 2, 0, 3), dim=0, enable_gqa=True)),
    "permute by list": (
        "THBD",
        cat_then(lambda x: torch.permute(x, (2, 1, 0, 3)), dim=0, enable_gqa=True),
    ),
    "contiguous": ("BHTD", cat_then(lambda x: repeated(x).contiguous())),
    "clone": ("BHTD", cat_then(lambda x: x.clone(), enable_gqa=True)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_cat_cache_are_looked_through(name: str) -> None:
    layout, function = VIEWS[name]
    site = site_of(function, *inputs_of(layout))
    assert (site.reason, site.idiom) == ("", "cat")
    assert site.keys is not None
    assert site.keys.dims == tuple(layout.index(letter) for letter in "BHTD")
    _assert_unchanged(function, inputs_of(layout))


MASKS = {
    "boolean": torch.ones(B, 1, N, T + N, dtype=torch.bool).tril(T - 1),
    "additive": random(B, 1, N, T + N),
    "one for each head": random(B, HQ, N, T + N),
    "of two dimensions": random(N, T + N),
    "of three dimensions": random(HQ, N, T + N),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_kept(name: str) -> None:
    inputs = [*inputs_of(), MASKS[name]]
    assert site_of(masked, *inputs).idiom == "cat"
    _assert_unchanged(masked, inputs)


def _written(write: Callable[..., Any], views: Callable[..., Tensor] = lambda x, end: x) -> Any:
    """A decoder that writes its new tokens into buffers, and attends to `views` of them."""

    def function(
        q: Tensor, kb: Tensor, vb: Tensor, k: Tensor, v: Tensor, mask: Tensor, pos: Any
    ) -> Tensor:
        write(kb, k, pos)
        write(vb, v, pos)
        keys, values = views(kb, 4), views(vb, 4)
        return sdpa(q, keys, values, mask[..., : keys.shape[2]], enable_gqa=True)

    return function


def _by_slice(buffer: Tensor, new: Tensor, pos: Any) -> None:
    buffer[:, :, 3:4] = new


def _by_ellipsis(buffer: Tensor, new: Tensor, pos: Any) -> None:
    buffer[..., 3:4, :] = new


def _by_index(buffer: Tensor, new: Tensor, pos: Any) -> None:
    buffer[:, :, pos] = new


WRITES: dict[str, Any] = {
    "index_copy_": _written(lambda b, new, pos: b.index_copy_(2, pos, new)),
    "index assignment": _written(_by_index),
    "slice assignment": _written(_by_slice),
    "ellipsis": _written(_by_ellipsis),
    "slice and copy_": _written(lambda b, new, pos: b[:, :, 3:4].copy_(new)),
    "narrow and copy_": _written(lambda b, new, pos: b.narrow(2, 3, 1).copy_(new)),
    "first tokens by slice": _written(_by_slice, lambda b, end: b[:, :, :end]),
    "first tokens by narrow": _written(_by_slice, lambda b, end: b.narrow(2, 0, end)),
    "all rows by slice": _written(_by_slice, lambda b, end: b[:B, :, :end]),
}


def _buffers() -> list[Any]:
    visible = torch.arange(T) <= 3
    return [*inputs_of(), visible.expand(B, 1, N, T).clone(), torch.tensor([3])]


@pytest.mark.parametrize("name", WRITES)
def test_written_buffers_are_found(name: str) -> None:
    site = site_of(WRITES[name], *_buffers())
    assert (site.reason, site.idiom) == ("", "in_place")
    _assert_unchanged(WRITES[name], _buffers())


def test_a_buffer_that_the_graph_creates_is_found() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        kb, vb = k.new_zeros(B, HKV, T, D), torch.zeros(B, HKV, T, D)
        kb[:, :, 0:3] = k
        vb[:, :, 0:3] = v
        out = sdpa(q, kb[:, :, :3], vb[:, :, :3], is_causal=True, enable_gqa=True)
        return out, kb, vb

    inputs = [random(B, HQ, 3, D), *(random(B, HKV, 3, D) for _ in "kv")]
    assert site_of(function, *inputs).idiom == "in_place"
    _assert_unchanged(function, inputs)


def _assert_unchanged(function: Callable[..., Any], inputs: list[Any]) -> None:
    """Compiled with the backend, a function returns and writes what it does without."""

    def fresh() -> list[Any]:
        return [x.clone() for x in inputs]

    plain, compiled = fresh(), fresh()
    backend = clusterkv_backend(inner="eager")
    torch._dynamo.reset()
    with torch.no_grad():
        expected = function(*plain)
        seen = torch.compile(function, backend=backend, fullgraph=True)(*compiled)
    torch.testing.assert_close(seen, expected)
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0)
    assert backend.stats().sites_rewritten == 1


def test_a_rewritten_graph_has_no_site_left() -> None:
    gm = copy_of(captured(cat_then(repeated), *inputs_of()))
    with torch.no_grad():
        plans, kept = rewrite_pass(gm, find_sites(gm.graph), [5])
        assert find_sites(gm.graph) == []
    assert kept == [0]
    assert plans[0].outputs == ((1,), (2,))
    assert not any(node.target is torch.cat for node in gm.graph.nodes)


def test_a_graph_without_the_pattern_is_untouched() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1).relu().softmax(-1)

    gm = captured(function, random(2, 3), random(2, 5))
    before = gm.code
    backend = clusterkv_backend(inner="eager")
    assert backend(gm, []) == gm.forward
    assert gm.code == before
    assert backend.stats().sites_skipped == 0


@pytest.mark.parametrize(
    ("stack", "path", "layer"),
    [
        ([], "", None),
        (["L['self']"], "", None),
        (["L['self']", "L['self'].model.layers.3.self_attn"], "model.layers.3.self_attn", 3),
        (["L['args'][0].model.layers.11.self_attn"], "model.layers.11.self_attn", 11),
        (["L['self'].model.layers[2].attn"], "model.layers.2.attn", 2),
        (["G['x'].h.block_1.0"], "h.block_1.0", 0),
        (["L['self'].transformer.h.7.attn.inner.0"], "transformer.h.7.attn.inner.0", 7),
        (["L['self'].stage2.attention"], "stage2.attention", None),
    ],
)
def test_the_module_path_tells_the_layer(stack: list[str], path: str, layer: int | None) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {str(i): (p, object) for i, p in enumerate(stack)}
    assert module_path(node) == (path, layer)
