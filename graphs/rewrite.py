"""Replaces attention sites: `rewrite_pass(gm, sites)` -> the copy that runs ClusterKV.

Why this is sound. A `cat` cache is read by attention and returned, by nothing else (sites.py makes
sure): so the operator may append the new tokens to a store of its own, attend over the store, and
the graph need not build the cache at all; the callable around it returns views of the store as
"the cache", with the same shape and contents. An in-place cache is still written by the model; the
operator only reads it. The layout, the repetition of KV heads and the mask carry over unchanged.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from clusterkv_ops.graphs import runtime  # noqa: F401  (defines the operators)
from clusterkv_ops.graphs.peel import Dims, argument
from clusterkv_ops.graphs.sites import CacheNodes, Site

log = logging.getLogger(__name__)
ops = torch.ops.clusterkv_graph


@dataclass(frozen=True)
class SitePlan:
    """How the callable around the graph finds and returns the cache of one site.

    Attributes:
        layer: number of the site's layer in its model.
        idiom: "cat" or "in_place".
        past: places of the cached keys and values among the graph's inputs, None if empty (or, in
            place, made by the graph).
        outputs: for keys and values, the places among the original graph's outputs.
        dims: where batch, heads, tokens and head_dim lie in the cache.
    """

    layer: int
    idiom: str
    past: tuple[int, int] | None
    outputs: tuple[tuple[int, ...], tuple[int, ...]]
    dims: Dims


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module to rewrite: Dynamo reads the original again when it builds guards."""
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def rewrite_pass(
    gm: fx.GraphModule, sites: list[Site], layers: list[int]
) -> tuple[list[SitePlan], list[int]]:
    """Replace `sites` in `gm` (in place) by the runtime's operators.

    Returns the plan of each site, and which of the graph's former outputs it still returns.
    """
    output = next(node for node in gm.graph.nodes if node.op == "output")
    outputs = list(output.args[0])
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    token = _token(gm, sites[0])
    plans = []
    for number, (site, layer) in enumerate(zip(sites, layers, strict=True)):
        assert site.keys is not None
        assert site.values is not None
        plans.append(_plan(site.keys, site.values, layer, inputs, outputs))
        _replace(gm.graph, site, number, token)
    dropped = {
        place
        for plan in plans
        if plan.idiom == "cat"
        for place in (*plan.outputs[0], *plan.outputs[1])
    }
    outputs = list(output.args[0])  # attention's results may be among them
    kept = [place for place in range(len(outputs)) if place not in dropped]
    output.args = (tuple(outputs[place] for place in kept),)
    for site in sites:
        _erase_dead(gm.graph, site.node)
    gm.graph.lint()
    gm.recompile()
    log.info("rewrote %d attention sites, %d outputs kept", len(sites), len(kept))
    return plans, kept


def _token(gm: fx.GraphModule, site: Site) -> fx.Node:
    """A buffer that every operator claims to write, so that none is merged or dropped."""
    query = argument(site.node, 0, "query").meta["example_value"]
    gm.register_buffer("clusterkv_token", torch.zeros(1, dtype=torch.int64, device=query.device))
    last_input = [node for node in gm.graph.nodes if node.op == "placeholder"][-1:]
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(last_input[0] if last_input else first):
        return gm.graph.get_attr("clusterkv_token")


def _plan(
    keys: CacheNodes, values: CacheNodes, layer: int, inputs: list[fx.Node], outputs: list[Any]
) -> SitePlan:
    past = None
    if keys.past in inputs and values.past in inputs:
        past = (inputs.index(keys.past), inputs.index(values.past))
    places = [
        tuple(i for i, node in enumerate(outputs) if node is cache.cache)
        for cache in (keys, values)
    ]
    return SitePlan(layer, keys.idiom, past, (places[0], places[1]), keys.dims)


def _replace(graph: fx.Graph, site: Site, number: int, token: fx.Node) -> None:
    node, keys, values = site.node, site.keys, site.values
    assert keys is not None
    assert values is not None
    query, mask = argument(node, 0, "query"), argument(node, 3, "attn_mask")
    is_causal, scale = bool(argument(node, 5, "is_causal", False)), argument(node, 6, "scale")
    scale = None if scale is None else float(scale)
    with graph.inserting_before(node):
        if keys.idiom == "cat":
            new = [_in_order(graph, c.new, c.dims) for c in (keys, values)]
            args = (query, *new, mask, token, number, scale, is_causal)
            call = graph.call_function(ops.attend.default, args)
        else:
            seen = [_in_order(graph, c.operand, c.operand_dims) for c in (keys, values)]
            is_tensor = isinstance(keys.positions, fx.Node) and isinstance(
                keys.positions.meta.get("example_value"), torch.Tensor
            )
            where = (keys.positions, 0) if is_tensor else (None, keys.positions)
            args = (query, *seen, mask, *where, token, number, scale, is_causal)
            call = graph.call_function(ops.attend_in_place.default, args)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)


def _in_order(graph: fx.Graph, node: fx.Node, dims: Dims) -> fx.Node:
    """`node` with its dimensions as [B, H, T, D]."""
    if dims == (0, 1, 2, 3):
        return node
    ordered = graph.call_method("permute", (node, *dims))
    example = node.meta.get("example_value")
    if isinstance(example, torch.Tensor):
        ordered.meta["example_value"] = example.permute(*dims)
    return ordered


def _erase_dead(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that nothing uses, and what was made for it alone: views and `cat`s."""
    is_call = node.op in ("call_function", "call_method")
    writes = isinstance(node.target, str) and node.target.endswith("_")
    if node.users or not is_call or writes or node._erased:
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        _erase_dead(graph, source)
