"""Which cache a tensor belongs to: from what the model holds to what we know about it.

A store lives in the storage behind the views that the model holds, and dies with them: what we
know about it hangs on the storage by a weak reference. No address is compared, so memory that is
used again can't be mistaken for an old cache, and crops and older views are recognised as well.

    model's cache tensor --> its storage --> Record: shape, length, Sequence
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from clusterkv_ops.counters import Counters
from clusterkv_ops.graphs.fingerprint import RowHash, extended, matching_rows
from clusterkv_ops.graphs.peel import Dims
from clusterkv_ops.sequence import Sequence
from clusterkv_ops.store import KVStore, is_first_part, is_seen_elsewhere


@dataclass
class Record:
    """What is known about a storage: as a store of ours, or as a buffer of the model's."""

    sequence: Sequence
    shape: torch.Size
    length: int = 0
    offset: int = 0
    version: int | None = None
    row_hash: RowHash | None = None
    is_busy: bool = False
    item_bytes: int = 2

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values held, without the room to grow."""
        if len(self.shape) == 5:
            _, batch, heads, _, head_dim = self.shape
            return self.length * batch * heads * 2 * head_dim * self.item_bytes
        return 2 * self.shape.numel() * self.item_bytes


@dataclass
class OpenCache:
    """A cache for the time of one call of a graph."""

    sequence: Sequence
    store: KVStore | None = None
    record: Record | None = None
    row_hash: RowHash | None = None
    origin: torch.UntypedStorage | None = None

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Put new tokens into the store, which is made for the first ones."""
        if self.store is None:
            self.store = KVStore.like(keys, keys.shape[2])
        self.store.append(keys, values)
        self.row_hash = extended(self.row_hash, keys)


class CacheRegistry:
    """The caches of one backend. `new_sequence(layer)` makes the state of an unknown one."""

    def __init__(self, new_sequence: Callable[[int], Sequence], counters: Counters) -> None:
        self._new_sequence = new_sequence
        self._counters = counters
        self._records = WeakIdKeyDictionary()
        self._last: dict[int, tuple[RowHash, Sequence]] = {}
        self._lock = threading.Lock()

    def sequences(self) -> Iterator[tuple[Sequence, Record]]:
        """Every sequence whose cache is alive."""
        with self._lock:
            records = [r for found in self._records.values() for r in found.values()]
        return ((record.sequence, record) for record in records)

    def open_empty(self, layer: int) -> OpenCache:
        return OpenCache(self._new_sequence(layer))

    def open_store(self, layer: int, keys: Tensor, values: Tensor, dims: Dims) -> OpenCache:
        """The store behind past keys and values, or a copy of them.

        `dims` says where batch, heads, tokens and head_dim lie in them.
        """
        is_shared = is_seen_elsewhere(keys, values)  # before more views are made
        keys, values = keys.permute(dims), values.permute(dims)
        length = keys.shape[2]
        with self._lock:
            found = self._find(keys, values)
            if found is not None and (length == found[0].length or not is_shared):
                found[0].is_busy = True
                return self._reopen(*found, keys)
        self._counters.add(store_copies=1)
        if found is not None:
            sequence, row_hash = found[0].sequence.fork(length), None
        else:
            sequence, row_hash = self._adopt(layer, keys)
        store = KVStore.like(keys, length)
        store.append(keys, values)
        return OpenCache(sequence, store, row_hash=row_hash or extended(None, keys))

    def close_store(self, layer: int, cache: OpenCache) -> tuple[Tensor, Tensor]:
        """Remember the store; returns the views that show it to the model."""
        store = cache.store
        assert store is not None
        record = Record(
            cache.sequence,
            store.buffer.shape,
            store.length,
            row_hash=cache.row_hash,
            item_bytes=store.buffer.element_size(),
        )
        storage = store.buffer.untyped_storage()
        with self._lock:
            if cache.origin is not None and cache.origin is not storage:
                self._records.pop(cache.origin, None)  # it grew: nothing is appended there again
            self._records[storage] = {0: record}
            if cache.row_hash is not None:
                self._last[layer] = (cache.row_hash, cache.sequence)
        return store.views()

    def abandon(self, cache: OpenCache) -> None:
        """After a failed call: the store is as long as the model still thinks it is."""
        if cache.record is not None:
            cache.record.is_busy = False

    def open_buffer(self, layer: int, keys: Tensor) -> OpenCache:
        """The state of a buffer that the model writes itself."""
        with self._lock:
            found = self._records.get(keys.untyped_storage(), {})
            record = found.get(keys.storage_offset())
        is_known = record is not None and record.shape == keys.shape
        if record is None or not is_known or record.version != version_of(keys):
            return self.open_empty(layer)
        record.sequence.settle()
        return OpenCache(record.sequence)

    def close_buffer(self, cache: OpenCache, keys: Tensor) -> None:
        record = Record(
            cache.sequence,
            keys.shape,
            offset=int(keys.storage_offset()),
            version=version_of(keys),
            item_bytes=keys.element_size(),
        )
        with self._lock:
            storage = keys.untyped_storage()
            self._records.setdefault(storage, {})[record.offset] = record

    def _find(self, keys: Tensor, values: Tensor) -> tuple[Record, KVStore] | None:
        """The store that keys and values `[B, Hkv, T, D]` are the first tokens of."""
        record = self._records.get(keys.untyped_storage(), {}).get(0)
        if record is None or record.is_busy or len(record.shape) != 5:
            return None
        store = KVStore.behind(keys, record.shape, record.length)
        whole = store.views()
        is_ours = is_first_part(keys, whole[0]) and is_first_part(values, whole[1])
        return (record, store) if is_ours and keys.shape == values.shape else None

    def _reopen(self, record: Record, store: KVStore, keys: Tensor) -> OpenCache:
        length = store.length = keys.shape[2]
        if length != record.sequence.kv_len:
            record.sequence.crop(length)
        row_hash = record.row_hash if length == record.length else extended(None, keys)
        return OpenCache(record.sequence, store, record, row_hash, keys.untyped_storage())

    def _adopt(self, layer: int, keys: Tensor) -> tuple[Sequence, RowHash | None]:
        """State for tokens that we never saw, or that the model has put in another order."""
        row_hash = extended(None, keys)
        last = self._last.get(layer)
        if row_hash is not None and last is not None and last[0].length == row_hash.length:
            rows = matching_rows(row_hash, last[0])
            if rows is not None:
                return last[1].fork(row_hash.length, rows), row_hash
        sequence = self._new_sequence(layer)
        sequence.adopt(keys.shape[2])
        return sequence, row_hash


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written; None for an inference tensor, which doesn't count."""
    return None if tensor.is_inference() else tensor._version
