"""The cluster cache on the device: hits, slots handed out in order, ages, several steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clusterkv_ops import reference
from tests.ops.inputs import DTYPES, Shape, token_major

CPU = torch.device("cpu")


def empty_cache(shape: Shape, num_slots: int, dtype: torch.dtype) -> list[Tensor]:
    size = (shape.batch, shape.heads, num_slots)
    rows = torch.zeros(2, *size, shape.head_dim, dtype=dtype)
    return [rows[0], rows[1], torch.full(size, -1).int(), torch.zeros(size).int()]


def wanted_tokens(shape: Shape, heads: int, selected: int, step: int) -> Tensor:
    """Selections that drift from step to step, with repetitions between heads."""
    generator = torch.Generator().manual_seed(step)
    window = torch.randint(0, 2 * selected, (shape.batch, heads, selected), generator=generator)
    distinct = window.sort(dim=-1).values + torch.arange(selected) + 7 * step
    distinct = torch.where(distinct < shape.kv_len, distinct, -1)
    shuffled = distinct[:, :, torch.randperm(selected, generator=generator)]
    shuffled[:, :, selected - selected // 4 :] = -1
    return shuffled.int()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("recall_steps", [0, 1, 2])
def test_six_steps_match(emulated: Any, dtype: torch.dtype, group: int, recall_steps: int) -> None:
    shape = Shape(kv_len=400, head_dim=64)
    keys, values = token_major(shape, dtype, CPU)
    num_slots = (recall_steps + 1) * 24 * group
    mine, expected = (empty_cache(shape, num_slots, dtype) for _ in range(2))
    for step in range(6):
        indices = wanted_tokens(shape, shape.heads * group, 24, step)
        actual = emulated.recall(keys, values, indices, *mine, recall_steps)
        oracle = reference.recall(keys, values, indices, *expected, recall_steps)
        for one, other in zip([*actual, *mine], [*oracle, *expected], strict=True):
            assert torch.equal(one, other)


def test_a_table_beyond_shared_memory_matches(emulated: Any) -> None:
    shape = Shape(batch=1, heads=1, kv_len=9000, head_dim=8)
    keys, values = token_major(shape, torch.float32, CPU)
    indices = torch.randperm(9000, generator=torch.Generator().manual_seed(0))[None, None].int()
    mine, expected = (empty_cache(shape, 9000, torch.float32) for _ in range(2))
    for given in (indices[..., :5000], indices[..., 2500:7000]):
        actual = emulated.recall(keys, values, given, *mine, 1)
        oracle = reference.recall(keys, values, given, *expected, 1)
        for one, other in zip([*actual, *mine], [*oracle, *expected], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("head_dim", [5, 36, 80, 256])
def test_rows_of_any_width_arrive_whole(emulated: Any, head_dim: int) -> None:
    shape = Shape(kv_len=60, head_dim=head_dim)
    keys, values = token_major(shape, torch.bfloat16, CPU)
    cache = empty_cache(shape, 40, torch.bfloat16)
    indices = wanted_tokens(shape, 2, 20, 0)
    slots, _, misses = emulated.recall(keys, values, indices, *cache, 1)
    assert misses.sum() == (slots >= 0).sum()
    for row, head, place in (indices >= 0).nonzero().tolist():
        token, slot = indices[row, head, place], slots[row, head, place]
        assert torch.equal(cache[0][row, head, slot], keys[row, head, token])
        assert torch.equal(cache[1][row, head, slot], values[row, head, token])


def test_too_few_slots_leave_tokens_without_one(emulated: Any) -> None:
    shape = Shape(batch=1, heads=1, kv_len=50)
    keys, values = token_major(shape, torch.float32, CPU)
    cache = empty_cache(shape, 4, torch.float32)
    indices = torch.tensor([[[9, 8, 7, 6, 5, 4]]], dtype=torch.int32)
    slots, hits, misses = emulated.recall(keys, values, indices, *cache, 1)
    assert slots.tolist() == [[[0, 1, 2, 3, -1, -1]]]
    assert (hits.item(), misses.item()) == (0, 6)
    assert cache[2].tolist() == [[[9, 8, 7, 6]]]


def test_positions_outside_are_not_wanted(emulated: Any) -> None:
    shape = Shape(batch=1, heads=1, kv_len=50)
    keys, values = token_major(shape, torch.float32, CPU)
    cache = empty_cache(shape, 9, torch.float32)
    indices = torch.tensor([[[50, 3, 2**31 - 1, -9]]], dtype=torch.int32)
    slots, _, misses = emulated.recall(keys, values, indices, *cache, 1)
    assert slots.tolist() == [[[-1, 0, -1, -1]]]
    assert misses.item() == 1


def test_state_must_be_the_callers_memory(emulated: Any) -> None:
    shape = Shape(batch=1, heads=2, kv_len=50)
    keys, values = token_major(shape, torch.float32, CPU)
    cache = empty_cache(shape, 9, torch.float32)
    cache[2] = torch.full((1, 2, 18), -1).int()[:, :, ::2]
    indices = torch.zeros(1, 2, 4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="slot_indices: expected a contiguous tensor"):
        emulated.recall(keys, values, indices, *cache, 1)
