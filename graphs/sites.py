"""Finds the attention sites of a Dynamo graph and the KV cache that each one reads.

A site is a call of `scaled_dot_product_attention`. It can be rewritten when its keys and values
come from a cache of one of two idioms:

* `cat`: `cat([past, new])` along the tokens, returned by the graph (transformers' DynamicCache,
  functional decoders).
* `in_place`: a buffer that the graph writes new tokens into (`index_copy_`, index or slice
  assignment; StaticCache, gpt-fast style modules).

Everything else is left as it is, with a reason.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from clusterkv_ops.graphs.peel import Dims, Peeled, argument, is_whole, peel, shape_of

SDPA = torch.nn.functional.scaled_dot_product_attention
_CAT = {torch.cat, torch.concat, torch.concatenate}
_CREATE = {torch.zeros, torch.empty, torch.full, torch.zeros_like, torch.empty_like}
_CREATE_METHODS = {"new_zeros", "new_empty", "new_full"}
_VIEWS = {"expand", "unsqueeze", "reshape", "view", "flatten", "transpose", "permute"}
_VIEWS |= {"contiguous", "clone", "repeat_interleave", "to", "swapaxes"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256

Idiom = Literal["cat", "in_place"]


class CacheNodes(NamedTuple):
    """One cache (of keys or of values) in the graph.

    Attributes:
        cache: the `cat`, or the buffer.
        past: the cached part of a `cat`, None when it is empty; the buffer of an in-place cache.
        new: the new tokens, in the cache's own layout.
        positions: in-place only: the tensor or integer that says where the new tokens go.
        dims: where batch, heads, tokens, head_dim lie in the cache.
        operand: in-place only: the buffer, cut to the tokens that attention sees.
        operand_dims: the same as `dims`, in the operand.
    """

    idiom: Idiom
    cache: fx.Node
    past: fx.Node | None
    new: fx.Node
    positions: Any
    dims: Dims
    operand: fx.Node
    operand_dims: Dims


@dataclass(frozen=True)
class Site:
    """One attention call: where it is, and its cache, or why it is left alone."""

    node: fx.Node
    path: str
    layer: int | None
    keys: CacheNodes | None = None
    values: CacheNodes | None = None
    reason: str = ""

    @property
    def idiom(self) -> str:
        return self.keys.idiom if self.keys else "-"


class _LeftAloneError(Exception):
    """Why a site can't be rewritten."""


def find_sites(graph: fx.Graph) -> list[Site]:
    """Every attention site of a Dynamo graph, in order. The graph is not changed."""
    sites = []
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        path, layer = module_path(node)
        if node.target is SDPA:
            try:
                keys, values = _caches(node)
                sites.append(Site(node, path, layer, keys, values))
            except _LeftAloneError as why:
                sites.append(Site(node, path, layer, reason=str(why)))
        elif reason := _other_attention(node):
            sites.append(Site(node, path, layer, reason=reason))
    return sites


def module_path(node: fx.Node) -> tuple[str, int | None]:
    """The module that a node belongs to, and the layer number in its path."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((p for p, _ in reversed(stack.values())), "") if stack else ""
    path = re.sub(r"^[LG]\['\w+'\](\[\d+\])*\.?", "", path)  # L['self'], L['args'][0]
    path = re.sub(r"[\[\]'\"._]*[\[\].][\[\]'\"._]*", ".", path).strip(".")
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path)
    return path, int(numbers[0]) if numbers else None


def query_length(site: Site) -> Any:
    """How many tokens the site asks for: 1 in a decode step. May be symbolic, None if unknown."""
    query = argument(site.node, 0, "query")
    shape = shape_of(query) if isinstance(query, fx.Node) else None
    return shape[2] if shape and len(shape) == 4 else None


def _caches(node: fx.Node) -> tuple[CacheNodes, CacheNodes]:
    query, key, value = (argument(node, i, n) for i, n in enumerate(("query", "key", "value")))
    _check_call(node, query, key, value)
    keys, values = _cache(key, "keys", node), _cache(value, "values", node)
    if keys.idiom != values.idiom or keys.dims != values.dims:
        raise _LeftAloneError("keys and values are cached in different ways")
    return keys, values


def _check_call(node: fx.Node, query: Any, key: Any, value: Any) -> None:
    tensors = [x.meta.get("example_value") for x in (query, key, value)]
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in tensors):
        raise _LeftAloneError("query, key and value are not [B, H, T, D]")
    q, k, v = tensors
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise _LeftAloneError("gradients are on: call the model under torch.no_grad()")
    if argument(node, 4, "dropout_p", 0.0) != 0.0:
        raise _LeftAloneError("dropout")
    if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise _LeftAloneError(f"dtype {k.dtype} (supported: float32, bfloat16, float16)")
    if not isinstance(k.shape[3], int) or k.shape[3] > _MAX_HEAD_DIM:
        raise _LeftAloneError(f"head_dim {k.shape[3]} is over {_MAX_HEAD_DIM}")
    if statically_known_true(q.shape[0] != k.shape[0]):
        raise _LeftAloneError("query and keys differ in batch size")
    if v.shape[3] != k.shape[3]:
        raise _LeftAloneError("keys and values differ in head_dim")
    mask = argument(node, 3, "attn_mask")
    seen = mask.meta.get("example_value") if isinstance(mask, fx.Node) else None
    if mask is not None and not (isinstance(seen, torch.Tensor) and seen.dim() in (2, 3, 4)):
        raise _LeftAloneError("unknown mask")
    if isinstance(seen, torch.Tensor) and seen.dtype not in (torch.bool, *_DTYPES):
        raise _LeftAloneError(f"unknown mask: dtype {seen.dtype}")
    if not isinstance(argument(node, 6, "scale"), float | int | None):
        raise _LeftAloneError("the softmax scale is computed in the graph")


def _cache(operand: fx.Node, name: str, site: fx.Node) -> CacheNodes:
    peeled = peel(operand)
    root = peeled.root
    if root.target in _CAT:
        return _cat_cache(peeled, name)
    written = _writes(root, site)
    if written:
        return _buffer_cache(peeled, written, name)
    if root.op == "placeholder":
        raise _LeftAloneError(
            f"cross-attention, or a cache that does not grow: {name} are not written"
        )
    if root.op in ("get_attr",) or root.target in _CREATE:
        raise _LeftAloneError(f"{name} come from a constant")
    raise _LeftAloneError(f"no cache: {name} come from {_name(root)}")


def _cat_cache(peeled: Peeled, name: str) -> CacheNodes:
    cat, dims = peeled.root, peeled.dims
    pieces, dim = cat.args[0], argument(cat, 1, "dim", 0)
    if not isinstance(pieces, list | tuple) or len(pieces) != 2 or dim % 4 != dims[2]:
        raise _LeftAloneError(f"no cache: {name} come from a concatenation of another kind")
    past, new = pieces
    if not isinstance(past, fx.Node) or not isinstance(new, fx.Node):
        raise _LeftAloneError(f"no cache: {name} come from a concatenation of another kind")
    if peeled.prefix is not cat:
        raise _LeftAloneError(f"cached {name} are cut before attention")
    uses = {user for user in cat.users if user.op != "output"}
    reaching = {user for user in uses if _feeds_attention_only(user)}
    for user in uses - reaching:
        if user.target is operator.getitem:
            raise _LeftAloneError(f"sliding window: a part of the cached {name} is kept")
        raise _LeftAloneError(f"cached {name} are also used by {_name(user)}")
    if not any(user.op == "output" for user in cat.users):
        raise _LeftAloneError(f"no cache: concatenated {name} are not returned")
    size = shape_of(past)
    if size is not None and any(isinstance(s, int) and s == 0 for s in size):
        return CacheNodes("cat", cat, None, new, None, dims, cat, dims)
    if past.op != "placeholder":
        raise _LeftAloneError(f"cached {name} are computed in the graph by {_name(past)}")
    return CacheNodes("cat", cat, past, new, None, dims, cat, dims)


def _feeds_attention_only(node: fx.Node) -> bool:
    """Whether everything made from `node` ends in attention as key or value."""
    if node.target is SDPA:
        return True
    if peel_step(node) is None:
        return False
    return all(_feeds_attention_only(user) for user in node.users)


def peel_step(node: fx.Node) -> fx.Node | None:
    """The node that `node` is a view of, where peel can look through it."""
    if node.op not in ("call_method", "call_function") or not node.args:
        return None
    source: Any = node.args[0]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    index: Any = node.args[1] if node.target is operator.getitem else None
    has_new_dim = isinstance(index, tuple) and None in index
    is_view = name in _VIEWS or has_new_dim
    return source if is_view and isinstance(source, fx.Node) else None


def _buffer_cache(
    peeled: Peeled, written: list[tuple[fx.Node, Any, int]], name: str
) -> CacheNodes:
    buffer, dims = peeled.root, peeled.dims
    if len(written) != 1:
        raise _LeftAloneError(f"the {name} buffer is written {len(written)} times")
    new, positions, dim = written[0]
    if dim != dims[2]:
        raise _LeftAloneError(
            f"the {name} buffer is written along dimension {dim}, not its tokens"
        )
    if buffer.op not in ("placeholder", "get_attr") and not _is_created(buffer):
        raise _LeftAloneError(f"the {name} buffer is computed in the graph by {_name(buffer)}")
    operand, operand_dims = peeled.prefix, peeled.prefix_dims
    return CacheNodes("in_place", buffer, buffer, new, positions, dims, operand, operand_dims)


def _is_created(node: fx.Node) -> bool:
    return node.target in _CREATE or node.target in _CREATE_METHODS


def _writes(buffer: fx.Node, site: fx.Node) -> list[tuple[fx.Node, Any, int]]:
    """What is written into `buffer` before `site`: (new tokens, where, along which dimension)."""
    found = []
    for user in buffer.users:
        if user < site and (write := _write(user, buffer)) is not None:
            found.append(write)
    return found


def _write(user: fx.Node, buffer: fx.Node) -> tuple[fx.Node, Any, int] | None:
    args: Any = user.args
    if args[:1] != (buffer,):
        return None
    if user.target == "index_copy_":
        return args[3], args[2], args[1] % 4
    if user.target is operator.setitem:
        where = _index(args[1], buffer)
        return (args[2], *where) if where and isinstance(args[2], fx.Node) else None
    if user.target is operator.getitem or user.target in ("narrow", torch.narrow):
        copies: list[Any] = [c for c in user.users if c.target == "copy_" and c.args[0] is user]
        where = _index(args[1], buffer) if user.target is operator.getitem else _narrow(user)
        return (copies[0].args[1], *where) if where and len(copies) == 1 else None
    return None


def _narrow(node: fx.Node) -> tuple[Any, int]:
    return argument(node, 2, "start"), argument(node, 1, "dim") % 4


def _index(items: Any, buffer: fx.Node) -> tuple[Any, int] | None:
    """The one dimension that an index picks tokens along, and the first token or their tensor."""
    shape = shape_of(buffer)
    if not isinstance(items, tuple) or None in items or shape is None or len(shape) != 4:
        return None
    items = list(items)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (4 - len(items) + 1)
    picked = [(d, item) for d, item in enumerate(items) if item != slice(None)]
    if len(picked) > 1:
        picked = [(d, item) for d, item in picked if not is_whole(item, shape[d])]
    if len(picked) != 1:
        return None
    dim, item = picked[0]
    if isinstance(item, slice):
        return None if item.step not in (None, 1) else (item.start or 0, dim)
    seen = item.meta.get("example_value") if isinstance(item, fx.Node) else None
    return (item, dim) if isinstance(seen, torch.Tensor) and seen.dim() == 1 else None


def _other_attention(node: fx.Node) -> str:
    name = _name(node)
    if name == "flex_attention":
        return "flex_attention: load the model with attn_implementation='sdpa'"
    shape = shape_of(node) if name == "softmax" else None
    if shape is not None and len(shape) == 4:
        if _is_made_by(node, "tanh", depth=6):
            return "soft-capped attention"
        return "attention by softmax: load the model with attn_implementation='sdpa'"
    return ""


def _is_made_by(node: fx.Node, name: str, depth: int) -> bool:
    """Whether a call of that name is among the few calls before `node`."""
    sources = node.all_input_nodes if depth else []
    return any(_name(s) == name or _is_made_by(s, name, depth - 1) for s in sources)


def _name(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return f"{node.op} {node.target}"
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
