"""The cluster cache: selected rows of K and V in device slots (ClusterKV, section 4.3).

Shapes: B batch, Hs selecting heads, Hkv key-value heads, T cached tokens, S selected tokens a
head, N slots, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recall(
    keys: Tensor,
    values: Tensor,
    indices: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    slot_indices: Tensor,
    slot_ages: Tensor,
    recall_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fetch the selected tokens that no slot holds; free what was last selected long ago."""
    batch, num_kv_heads = keys.shape[:2]
    wanted = indices.reshape(batch, num_kv_heads, -1)
    slots = torch.full_like(wanted, -1)
    hits = indices.new_zeros((batch, num_kv_heads))
    misses = indices.new_zeros((batch, num_kv_heads))
    for row in range(batch):
        for head in range(num_kv_heads):
            at = (row, head)
            slot_of, missed = _place(wanted[at].tolist(), slot_indices[at].tolist())
            taken = [slot_of[token] for token in missed]
            slot_keys[at][taken] = keys[at][missed]
            slot_values[at][taken] = values[at][missed]
            slot_indices[at][taken] = slot_indices.new_tensor(missed)
            _grow_older(list(slot_of.values()), slot_indices[at], slot_ages[at], recall_steps)
            found = [slot_of.get(token, -1) for token in wanted[at].tolist()]
            slots[at] = slots.new_tensor(found)
            hits[at] = len(slot_of) - len(missed)
            misses[at] = len(missed)
    return slots.reshape(indices.shape), hits, misses


def _place(wanted: list[int], held: list[int]) -> tuple[dict[int, int], list[int]]:
    """The slot of each wanted token, and the tokens to fetch, which take the lowest free slots."""
    tokens = dict.fromkeys(token for token in wanted if token >= 0)  # in order of appearance
    slot_holding = {token: slot for slot, token in enumerate(held) if token >= 0}
    free = [slot for slot, token in enumerate(held) if token < 0]
    missed = [token for token in tokens if token not in slot_holding]
    if len(missed) > len(free):
        raise RuntimeError(f"slot_indices: expected {len(missed)} free slots, got {len(free)}")
    slot_holding.update(zip(missed, free, strict=False))
    return {token: slot_holding[token] for token in tokens}, missed


def _grow_older(
    wanted_slots: list[int], slot_indices: Tensor, slot_ages: Tensor, recall_steps: int
) -> None:
    """Age every slot by a step, except the wanted ones; free those that are too old."""
    slot_ages.add_(1)
    slot_ages[slot_ages.new_tensor(wanted_slots, dtype=torch.int64)] = 0
    slot_indices.masked_fill_(slot_ages >= recall_steps, -1)
