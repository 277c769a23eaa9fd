"""Recognises rows of a cache by their content, after beam search has put them in another order.

Each row's keys are hashed as they are appended: h(n + 1) = h(n) * P + s(token), in 64-bit
integers, where s weighs the bits of the token's keys. A row that was copied elsewhere has the same
hash, so its clusters can be kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_PRIME = 1_000_003
_WEIGHT = 2_654_435_761


class RowHash(NamedTuple):
    """`hashes` `[B]` int64 of the first `length` tokens of each row."""

    hashes: Tensor
    length: int


def extended(before: RowHash | None, keys: Tensor) -> RowHash | None:
    """The hash after new keys `[B, Hkv, n, D]`; None for one row, which has no order."""
    batch, _, num_new, _ = keys.shape
    if batch == 1:
        return None
    bits = torch.int32 if keys.element_size() == 4 else torch.int16
    words = keys.transpose(1, 2).contiguous().view(bits).flatten(2).long()
    weights = torch.arange(1, words.shape[2] + 1, device=keys.device) * _WEIGHT
    tokens = (words * weights).sum(-1)
    powers = torch.full((num_new + 1,), _PRIME, device=keys.device)
    powers[0] = 1
    powers = powers.cumprod(0).flip(0)
    hashes = (tokens * powers[1:]).sum(-1)
    if before is not None:
        hashes = hashes + before.hashes * powers[0]
    return RowHash(hashes, num_new + (before.length if before else 0))


def matching_rows(wanted: RowHash, known: RowHash) -> Tensor | None:
    """For each wanted row the known row of equal content; None if one has none."""
    is_same = wanted.hashes[:, None] == known.hashes[None, :]
    return is_same.int().argmax(-1) if bool(is_same.any(-1).all()) else None
