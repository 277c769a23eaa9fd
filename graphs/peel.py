"""Looks through the views that stand between a KV cache and the attention that reads it.

Models repeat KV heads for their query groups, transpose, make contiguous and slice before they
call attention. `peel` walks from the attention's operand up to the tensor behind all of that, and
remembers where heads and tokens lie in it.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

_REPEAT_INTERLEAVE = ("repeat_interleave", torch.repeat_interleave)
_SAME_VALUES = {"contiguous", "clone", "detach", "to", "type_as", torch.clone, torch.detach}
_SWAPS = {"transpose", "swapaxes", "swapdims", torch.transpose, torch.swapaxes, torch.swapdims}
_PERMUTES = {"permute", torch.permute}
_MERGES = {"reshape", "view", "flatten", torch.reshape, torch.flatten}
_EXPANDS = {"expand", "expand_as", "broadcast_to", torch.broadcast_to}


Dims = tuple[int, int, int, int]


class Peeled(NamedTuple):
    """The tensor behind an attention operand.

    Attributes:
        root: the node that is no view of another.
        dims: where batch, heads, tokens and head_dim of the operand lie in the root.
        prefix: the node that cuts the root to its first tokens, or the root.
        prefix_dims: the same as `dims`, in the prefix.
    """

    root: fx.Node
    dims: Dims
    prefix: fx.Node
    prefix_dims: Dims


def shape_of(node: fx.Node) -> tuple[Any, ...] | None:
    """The shape that Dynamo saw for a tensor node, None for anything else."""
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def peel(node: fx.Node) -> Peeled:
    """Walk up from an attention operand `[B, H, T, D]` to the tensor behind its views."""
    dims = [0, 1, 2, 3]
    cut: tuple[fx.Node, list[int]] | None = None
    while True:
        source = _source(node)
        if source is None:
            break
        if node.target in _SAME_VALUES and _same_type(node, source):
            node = source
        elif node.target in _SWAPS:
            a, b = (d % 4 for d in (argument(node, 1, "dim0"), argument(node, 2, "dim1")))
            swap = {a: b, b: a}
            dims = [swap.get(d, d) for d in dims]
            node = source
        elif node.target in _PERMUTES:
            order = _order(node)
            dims = [order[d] % 4 for d in dims]
            node = source
        elif (repeated := _repeated_heads(node, dims[1])) is not None:
            node = repeated
        elif cut is None and _is_prefix(node, dims[2]):
            cut, node = (node, dims), source
        else:
            break
    prefix, prefix_dims = cut or (node, dims)
    return Peeled(node, _four(dims), prefix, _four(prefix_dims))


def _four(dims: list[int]) -> Dims:
    batch, heads, tokens, width = dims
    return batch, heads, tokens, width


def _source(node: fx.Node) -> fx.Node | None:
    if node.op not in ("call_method", "call_function") or not node.args:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


def _same_type(node: fx.Node, source: fx.Node) -> bool:
    new, old = node.meta.get("example_value"), source.meta.get("example_value")
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return False
    return new.dtype == old.dtype and new.device == old.device and new.dim() == 4


def _order(node: fx.Node) -> tuple[int, ...]:
    order = node.args[1:] if len(node.args) > 2 else argument(node, 1, "dims")
    return tuple(order[0] if isinstance(order[0], tuple | list) else order)


def _repeated_heads(node: fx.Node, heads: int) -> fx.Node | None:
    """The node whose heads (at dimension `heads`) `node` repeats, each one n times in a row."""
    before, after = None, shape_of(node)
    if node.target in _REPEAT_INTERLEAVE:
        before, dim = node.args[0], argument(node, 2, "dim")
        if not isinstance(argument(node, 1, "repeats"), int) or dim is None or dim % 4 != heads:
            return None
    elif node.target in _MERGES:
        expand = _source(node)
        if expand is None or expand.target not in _EXPANDS:
            return None
        unsqueeze = _source(expand)
        if unsqueeze is None or _unsqueezed_dim(unsqueeze) != heads + 1:
            return None
        before = _source(unsqueeze)
        wide = shape_of(expand)
        if wide is None or after is None or len(wide) != 5 or len(after) != 4:
            return None
        merged = (*wide[:heads], wide[heads] * wide[heads + 1], *wide[heads + 2 :])
        if not _equal(merged, after):
            return None
    if not isinstance(before, fx.Node):
        return None
    narrow = shape_of(before)
    if narrow is None or after is None or len(narrow) != 4 or len(after) != 4:
        return None
    others = [d for d in range(4) if d != heads]
    return before if _equal([narrow[d] for d in others], [after[d] for d in others]) else None


def _unsqueezed_dim(node: fx.Node) -> int | None:
    """Where `node` puts a new dimension of size 1 into a 4-D tensor, None if that isn't it."""
    if node.target in ("unsqueeze", torch.unsqueeze):
        dim = argument(node, 1, "dim")
        return dim % 5 if isinstance(dim, int) else None
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return None
    items = node.args[1]
    if items.count(None) != 1 or Ellipsis in items[: items.index(None)]:
        return None
    whole = all(item is None or item is Ellipsis or item == slice(None) for item in items)
    return items.index(None) if whole else None


def _is_prefix(node: fx.Node, tokens: int) -> bool:
    """Whether `node` is the first n tokens of its source, in full otherwise."""
    if node.target in ("narrow", torch.narrow):
        return argument(node, 1, "dim") % 4 == tokens and argument(node, 2, "start") == 0
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    items = list(node.args[1])
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (4 - len(items) + 1)
    source = None if (whole := _source(node)) is None else shape_of(whole)
    if source is None or len(items) > 4 or not all(isinstance(item, slice) for item in items):
        return False
    for dim, item in enumerate(items):
        if item.step not in (None, 1) or item.start not in (None, 0):
            return False
        if dim != tokens and not is_whole(item, source[dim]):
            return False
    return True


def is_whole(item: Any, size: Any) -> bool:
    """Whether an index takes all of a dimension of that size: `:`, or `:n` where n is the size."""
    if not isinstance(item, slice) or item.start not in (None, 0) or item.step not in (None, 1):
        return False
    stop = item.stop.meta.get("example_value") if isinstance(item.stop, fx.Node) else item.stop
    return stop is None or statically_known_true(stop == size)


def _equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(bool(x == y) for x, y in zip(a, b, strict=True))
