"""Recall: the selected rows of K and V, brought into device slots that remember recent ones.

    keys, values [B,Hkv,T,D], indices [B,Hs,S] --> slots [B,Hs,S], hits, misses [B,Hkv]

B batch, Hs selecting heads (Hq or Hkv), Hkv key-value heads, T cached tokens, S selected tokens a
head, N slots, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clusterkv_ops import schemas as _schemas  # noqa: F401  (defines the operators)
from clusterkv_ops.types import RecallCache, RecalledTokens, TokenSelection
from clusterkv_ops.validation import (
    check_at_least,
    check_device,
    check_keys,
    check_positions,
    check_same,
    check_shape,
    check_tensor,
    check_type,
    error,
)


def empty_cache(
    keys: Tensor, *, num_slots: int, device: torch.device | None = None
) -> RecallCache:
    """A recall cache for keys like these, every slot free.

    Args:
        keys: ``[B, Hkv, T, D]``; gives sizes and dtype.
        num_slots: N, slots of each KV head. A step that selects S tokens a head needs
            ``(recall_steps + 1) * S * Hs / Hkv`` of them, and never more than T.
        device: where the slots lie, by default where `keys` are.

    Returns:
        RecallCache: ``slot_keys``, ``slot_values [B, Hkv, N, D]``; ``slot_indices``, ``slot_ages
        [B, Hkv, N]`` int32.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a shape, dtype or range is wrong.

    Example:
        >>> empty_cache(torch.zeros(1, 2, 1000, 64), num_slots=256).slot_keys.shape
        torch.Size([1, 2, 256, 64])
    """
    check_keys("keys", keys)
    check_at_least("num_slots", num_slots, 1)
    batch, heads, _, head_dim = keys.shape
    device = keys.device if device is None else device
    rows = torch.zeros((batch, heads, num_slots, head_dim), dtype=keys.dtype, device=device)
    ages = torch.zeros((batch, heads, num_slots), dtype=torch.int32, device=device)
    return RecallCache(rows, torch.zeros_like(rows), torch.full_like(ages, -1), ages)


def recall(
    keys: Tensor,
    values: Tensor,
    selection: TokenSelection,
    cache: RecallCache,
    *,
    recall_steps: int = 1,
) -> RecalledTokens:
    """Find the selected tokens in the cache's slots and fetch those that no slot holds.

    What a KV head wants is the union of what its query heads selected. A wanted token that lies in
    a slot is a hit. Each miss takes the lowest free slot, in the order of first appearance, and
    its rows of K and V are copied there. Afterwards wanted slots have age 0 and all others are a
    step older; a slot whose age reaches `recall_steps` is free for the next step. With 0 every
    slot is freed at once, though this step's rows stay readable.

    Args:
        keys, values: ``[B, Hkv, T, D]`` of one dtype; any strides of B, Hkv and T.
        selection: ``indices [B, Hs, S]`` int32, -1 is skipped.
        cache: updated in place; needs ``(recall_steps + 1) * S * Hs / Hkv`` slots, or T.
        recall_steps: steps that a token stays after it was last wanted, at least 0.

    Returns:
        RecalledTokens: ``slots`` like ``indices``; ``hits + misses`` is the number of distinct
        wanted tokens of each KV head.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a shape, dtype or position is wrong, or the cache has too few slots.

    Note:
        Deterministic. Not differentiable. Traffic of a step: ``misses * 2 * D`` elements.

    Source:
        ClusterKV (arXiv:2412.03213), section 4.3: clusters of the last R steps stay, R = 1. We
        keep tokens rather than clusters, so a trimmed cluster costs only what was taken of it.

    Example:
        >>> keys = torch.arange(8.0).view(1, 1, 8, 1)
        >>> cache = empty_cache(keys, num_slots=6)
        >>> for tokens in ([5, 2, 7], [2, 5, 0]):
        ...     indices = torch.tensor([[tokens]], dtype=torch.int32)
        ...     selection = TokenSelection(indices, torch.tensor([[3]], dtype=torch.int32))
        ...     slots, hits, misses = recall(keys, -keys, selection, cache)
        ...     print(slots.tolist(), hits.item(), misses.item())
        [[[0, 1, 2]]] 0 3
        [[[1, 0, 3]]] 2 1
    """
    check_keys("keys", keys)
    check_tensor("values", values, keys.dtype)
    check_shape("values", values, *keys.shape)
    check_device("values", values, "keys", keys)
    check_at_least("recall_steps", recall_steps, 0)
    batch, num_kv_heads, kv_len, _ = keys.shape
    check_type("selection", selection, TokenSelection)
    indices = selection.indices
    check_tensor("selection.indices", indices, torch.int32)
    check_shape("selection.indices", indices, batch, "Hs", "S")
    if indices.shape[1] % num_kv_heads != 0 or indices.shape[1] == 0:
        raise error("selection.indices", f"a multiple of {num_kv_heads} heads", indices.shape[1])
    check_positions("selection.indices", indices, kv_len)
    check_cache(cache, keys)
    wanted = indices.shape[2] * (indices.shape[1] // num_kv_heads)
    needed, num_slots = (recall_steps + 1) * wanted, cache.slot_keys.shape[2]
    if num_slots < needed and num_slots < kv_len:
        raise error("cache", f"at least {min(needed, kv_len)} slots", num_slots)
    return RecalledTokens(*torch.ops.clusterkv.recall(keys, values, indices, *cache, recall_steps))


@torch.library.register_fake("clusterkv::recall")
def _(
    keys: Tensor,
    values: Tensor,
    indices: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    slot_indices: Tensor,
    slot_ages: Tensor,
    recall_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    slots = torch.empty_like(indices, memory_format=torch.contiguous_format)
    return slots, indices.new_empty(keys.shape[:2]), indices.new_empty(keys.shape[:2])


def check_cache(cache: RecallCache, keys: Tensor) -> None:
    """A cache made for keys of this batch size, number of heads, head_dim and dtype."""
    check_type("cache", cache, RecallCache)
    batch, num_kv_heads, _, head_dim = keys.shape
    check_tensor("cache.slot_keys", cache.slot_keys, keys.dtype)
    check_shape("cache.slot_keys", cache.slot_keys, batch, num_kv_heads, "N", head_dim)
    num_slots = cache.slot_keys.shape[2]
    check_same("cache.slot_values", cache.slot_values, "cache.slot_keys", cache.slot_keys)
    check_shape("cache.slot_values", cache.slot_values, batch, num_kv_heads, num_slots, head_dim)
    for name in ("slot_indices", "slot_ages"):
        tensor = getattr(cache, name)
        check_tensor(f"cache.{name}", tensor, torch.int32)
        check_shape(f"cache.{name}", tensor, batch, num_kv_heads, num_slots)
        check_device(f"cache.{name}", tensor, "cache.slot_keys", cache.slot_keys)
