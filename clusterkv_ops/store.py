"""KVStore: the keys and values of one layer, in a buffer with room to grow.

The buffer is token-major, `[capacity, B, Hkv, 2, D]`: K and V of a token lie side by side, and the
strides of the views `[B, Hkv, T, D]` that it hands out don't change when it grows, so that no
compiled graph has to be compiled again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SMALLEST_GROWTH = 256
_GROWTH_DIVISOR = 8


class KVStore:
    """Keys and values that grow at the end.

    A view that was handed out stays true as long as its tokens are not overwritten: growth moves
    the store to a new buffer and leaves the old one to the views that still look at it.

    Attributes:
        buffer: `[capacity, B, Hkv, 2, D]`.
        length: tokens held.
    """

    def __init__(self, buffer: Tensor, length: int = 0) -> None:
        self.buffer = buffer
        self.length = length

    @classmethod
    def like(cls, keys: Tensor, capacity: int) -> KVStore:
        """An empty store for keys `[B, Hkv, n, D]` with room for `capacity` tokens and some."""
        batch, heads, _, head_dim = keys.shape
        room = _rounded(capacity + _SMALLEST_GROWTH)
        return cls(keys.new_empty(room, batch, heads, 2, head_dim))

    @classmethod
    def behind(cls, view: Tensor, shape: torch.Size, length: int) -> KVStore:
        """The store whose buffer has this shape and lies behind a view that it handed out."""
        buffer: Any = torch.empty(0, dtype=view.dtype, device=view.device)
        return cls(buffer.set_(view.untyped_storage(), 0, shape), length)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Put `[B, Hkv, n, D]` keys and values behind the tokens held."""
        begin, end = self.length, self.length + keys.shape[2]
        if end > self.buffer.shape[0]:
            self._grow(end)
        place = self.buffer[begin:end].permute(3, 1, 2, 0, 4)
        place[0].copy_(keys)
        place[1].copy_(values)
        self.length = end

    def views(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, Hkv, length, D]` as views of the buffer."""
        keys, values = self.buffer[: self.length].permute(3, 1, 2, 0, 4).unbind(0)
        return keys, values

    def _grow(self, needed: int) -> None:
        capacity = self.buffer.shape[0]
        more = max(_SMALLEST_GROWTH, capacity // _GROWTH_DIVISOR)
        room = _rounded(max(needed, capacity + more))
        bigger = self.buffer.new_empty(room, *self.buffer.shape[1:])
        bigger[: self.length] = self.buffer[: self.length]
        self.buffer = bigger


def _rounded(capacity: int) -> int:
    return -(-capacity // 64) * 64


def is_first_part(view: Tensor, whole: Tensor) -> bool:
    """Whether `view` shows the first tokens of `whole`'s memory (both `[B, Hkv, T, D]`)."""
    if view.shape[2] > whole.shape[2] or view.dtype != whole.dtype:
        return False
    same_rows = view.shape[:2] == whole.shape[:2] and view.shape[3] == whole.shape[3]
    strides = zip(view.stride(), whole.stride(), view.shape, strict=True)
    return (
        same_rows
        and view.untyped_storage() is whole.untyped_storage()
        and view.storage_offset() == whole.storage_offset()
        and all(a == b or size == 1 for a, b, size in strides)
    )


def is_seen_elsewhere(keys: Tensor, values: Tensor) -> bool:
    """Whether tensors other than these two views (and their base) look at their storage."""
    storage = keys.untyped_storage()
    known = 3 + (keys._base is not None)  # the storage's own handle, keys, values, their base
    return bool(torch._C._storage_Use_Count(storage._cdata) > known)
