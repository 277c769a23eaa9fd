"""What runs in place of an attention site: the two operators that stand in a rewritten graph.

The operators are called by compiled code, which can't carry Python objects; the callable around
the graph opens the caches of its sites first and leaves them where the operators find them
(`running`). Host bookkeeping happens out there, the operators do the work on the device.

Shapes: B batch, Hq / Hkv heads, n new tokens, T tokens of a buffer, D head_dim.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from clusterkv_ops.graphs.caches import OpenCache
from clusterkv_ops.ranges import named_range

NAMESPACE = "clusterkv_graph"

library = torch.library.Library(NAMESPACE, "DEF")
# A cache of the `cat` idiom: key and value are the new tokens, the store appends them.
library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor(a!) token, int site, "
    "float? scale, bool is_causal) -> Tensor"
)
# A buffer that the model has written: `positions` (or `start`) says where the new tokens went.
library.define(
    "attend_in_place(Tensor query, Tensor keys, Tensor values, Tensor? mask, Tensor? positions, "
    "SymInt start, Tensor(a!) token, int site, float? scale, bool is_causal) -> Tensor"
)

_running = threading.local()


@contextmanager
def running(caches: list[OpenCache]) -> Iterator[None]:
    """Make these the caches of the sites 0, 1, ... for graphs that this thread runs."""
    outer = getattr(_running, "caches", None)
    _running.caches = caches
    try:
        yield
    finally:
        _running.caches = outer


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    token: Tensor,
    site: int,
    scale: float | None,
    is_causal: bool,
) -> Tensor:
    cache: OpenCache = _running.caches[site]
    with named_range(f"clusterkv.layer.{cache.sequence.layer}"):
        _check_batch(key, cache)
        with named_range("clusterkv.append"):
            cache.append(key, value)
        assert cache.store is not None
        keys, values = cache.store.views()
        out = cache.sequence.attend(
            query,
            keys,
            values,
            mask,
            num_new=key.shape[2],
            scale=_scale(query, scale),
            is_causal=is_causal,
            new=(key, value),
        )
    return _token_major(out)


def _attend_in_place(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    start: int,
    token: Tensor,
    site: int,
    scale: float | None,
    is_causal: bool,
) -> Tensor:
    sequence = _running.caches[site].sequence
    with named_range(f"clusterkv.layer.{sequence.layer}"):
        past = start if positions is None else int(positions[0])
        if past != sequence.kv_len:
            if 0 < past < sequence.kv_len:
                sequence.crop(past)
            else:
                sequence.restart(past)
        out = sequence.attend(
            query,
            keys,
            values,
            mask,
            num_new=query.shape[2],
            scale=_scale(query, scale),
            is_causal=is_causal,
        )
    return _token_major(out)


def _check_batch(key: Tensor, cache: OpenCache) -> None:
    if cache.store is None:
        return
    _, batch, heads, _, head_dim = cache.store.buffer.shape
    seen = (key.shape[0], key.shape[1], key.shape[3])
    if seen != (batch, heads, head_dim):
        raise ValueError(
            f"key: expected [B, Hkv, n, D] with B, Hkv, D = {(batch, heads, head_dim)} as "
            f"cached, got {seen}"
        )


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _token_major(out: Tensor) -> Tensor:
    """The layout that models ask for next, `[B, n, H, D]` in memory, as the fakes promise."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _fake_attend(query: Tensor, *_: object) -> Tensor:
    batch, heads, tokens, head_dim = query.shape
    return query.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


for _name, _implementation in (("attend", _attend), ("attend_in_place", _attend_in_place)):
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake_attend, lib=library)
