"""Recall: hits, misses and slots over several steps, and the rows that lie in the slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clusterkv_ops import (
    RecallCache,
    RecalledTokens,
    TokenSelection,
    empty_cache,
    recall,
    reference,
)
from tests.ops.inputs import DTYPES, GROUP_SIZES, Shape, generator, token_major

ops = torch.ops.clusterkv


def drifting_selection(
    shape: Shape, heads: int, selected: int, step: int, device: torch.device
) -> Tensor:
    """`[B, Hs, S]`: distinct tokens per head from a window that moves with the step, so that steps
    share tokens and so do heads. The last few are -1."""
    tokens = torch.full((shape.batch, heads, selected), -1, dtype=torch.int32)
    window = min(shape.kv_len, 2 * selected)
    first = (step * selected // 2) % (shape.kv_len - window + 1)
    for row in range(shape.batch):
        for head in range(heads):
            order = torch.randperm(window, generator=generator(step * 1000 + row * 50 + head))
            taken = order[: selected - selected // 8] + first
            tokens[row, head, : len(taken)] = taken
    return tokens.to(device)


def select(tokens: Tensor) -> TokenSelection:
    return TokenSelection(tokens, (tokens >= 0).sum(dim=-1, dtype=torch.int32))


def copy_of(cache: RecallCache) -> RecallCache:
    return RecallCache(*(tensor.clone() for tensor in cache))


def assert_same_state(actual: RecallCache, expected: RecallCache) -> None:
    """Equal bit by bit; the age of a free slot means nothing."""
    assert torch.equal(actual.slot_indices, expected.slot_indices)
    assert torch.equal(actual.slot_keys, expected.slot_keys)
    assert torch.equal(actual.slot_values, expected.slot_values)
    is_held = expected.slot_indices >= 0
    assert torch.equal(actual.slot_ages[is_held], expected.slot_ages[is_held])


def assert_slots_hold_the_rows(
    recalled: RecalledTokens, cache: RecallCache, tokens: Tensor, keys: Tensor, values: Tensor
) -> None:
    batch, heads, _ = tokens.shape
    group = heads // keys.shape[1]
    assert torch.equal(recalled.slots >= 0, tokens >= 0)
    for row in range(batch):
        for head in range(heads):
            is_token = tokens[row, head] >= 0
            token = tokens[row, head][is_token].long()
            slot = recalled.slots[row, head][is_token].long()
            kv_head = head // group
            assert torch.equal(cache.slot_keys[row, kv_head][slot], keys[row, kv_head][token])
            assert torch.equal(cache.slot_values[row, kv_head][slot], values[row, kv_head][token])


@pytest.mark.parametrize("recall_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_recall_matches_the_oracle_over_many_steps(
    device: torch.device, dtype: torch.dtype, group: int, recall_steps: int
) -> None:
    shape = Shape(group=group, kv_len=200, head_dim=64 if group < 7 else 33)
    keys, values = token_major(shape, dtype, device)
    heads, selected = shape.heads * group, 16
    cache = empty_cache(keys, num_slots=min((recall_steps + 1) * selected * group, 200))
    expected_cache = copy_of(cache)
    for step in range(7):
        tokens = drifting_selection(shape, heads, selected, step, device)
        recalled = RecalledTokens(*ops.recall(keys, values, tokens, *cache, recall_steps))
        expected = reference.recall(keys, values, tokens, *expected_cache, recall_steps)
        assert all(torch.equal(a, b) for a, b in zip(recalled, expected, strict=True))
        assert_same_state(cache, expected_cache)
        assert_slots_hold_the_rows(recalled, cache, tokens, keys, values)


@pytest.mark.parametrize("recall_steps", [0, 1, 2])
def test_hits_are_what_the_last_steps_wanted(device: torch.device, recall_steps: int) -> None:
    """A model with sets: what a KV head wants is the union over its query heads, held R steps."""
    shape = Shape(kv_len=120)
    keys, values = token_major(shape, torch.float32, device)
    cache = empty_cache(keys, num_slots=120)
    history: list[list[set[int]]] = [[] for _ in range(4)]
    for step in range(6):
        tokens = drifting_selection(shape, 6, 16, step, device)
        _, hits, misses = recall(keys, values, select(tokens), cache, recall_steps=recall_steps)
        unions = tokens.view(4, -1).tolist()
        for place, union in enumerate(unions):
            wanted = set(union) - {-1}
            recent = set().union(*history[place][-recall_steps:]) if recall_steps else set()
            assert hits.flatten()[place] == len(wanted & recent)
            assert misses.flatten()[place] == len(wanted - recent)
            history[place].append(wanted)
            held = cache.slot_indices.view(4, -1)[place].tolist()
            tokens_held = sorted(token for token in held if token >= 0)
            still = set().union(*history[place][-recall_steps:]) if recall_steps else set()
            assert tokens_held == sorted(still)  # the union once, not a copy per query head


def test_misses_take_the_lowest_free_slots_in_order_of_appearance(device: torch.device) -> None:
    keys, values = token_major(Shape(1, 1, 2, 50, 1, 8), torch.float32, device)
    cache = empty_cache(keys, num_slots=16)
    first = torch.tensor([[[9, 3, -1], [3, 7, 9]]], dtype=torch.int32, device=device)
    assert recall(keys, values, select(first), cache).slots.tolist() == [[[0, 1, -1], [1, 2, 0]]]
    second = torch.tensor([[[7, 8, 1], [2, 8, -1]]], dtype=torch.int32, device=device)
    slots, hits, misses = recall(keys, values, select(second), cache)
    assert slots.tolist() == [[[2, 3, 4], [5, 3, -1]]]
    assert (hits.item(), misses.item()) == (1, 3)
    assert cache.slot_indices[0, 0, :6].tolist() == [-1, -1, 7, 8, 1, 2]  # 9 and 3 have aged
    third = torch.tensor([[[4, 5, 6], [-1, -1, -1]]], dtype=torch.int32, device=device)
    assert recall(keys, values, select(third), cache).slots[0, 0].tolist() == [0, 1, 6]


def test_an_empty_selection_only_ages_the_cache(device: torch.device) -> None:
    keys, values = token_major(Shape(kv_len=50), torch.float32, device)
    cache = empty_cache(keys, num_slots=50)
    tokens = drifting_selection(Shape(kv_len=50), 6, 8, 0, device)
    recall(keys, values, select(tokens), cache, recall_steps=2)
    held = int((cache.slot_indices >= 0).sum())
    nothing = torch.full_like(tokens, -1)
    slots, hits, misses = recall(keys, values, select(nothing), cache, recall_steps=2)
    assert (slots == -1).all()
    assert hits.sum() == misses.sum() == 0
    assert int((cache.slot_indices >= 0).sum()) == held
    recall(keys, values, select(nothing[:, :, :0]), cache, recall_steps=2)
    assert (cache.slot_indices == -1).all()


def test_two_requests_do_not_share_slots(device: torch.device) -> None:
    """The same tokens of another request are other rows: no hit, and none of the first's rows."""
    shape = Shape(kv_len=100)
    tokens = drifting_selection(shape, 6, 16, 0, device)
    caches = []
    for seed in (0, 1):
        keys, values = token_major(shape, torch.float32, device, seed=seed)
        cache = empty_cache(keys, num_slots=100)
        recalled = recall(keys, values, select(tokens), cache)
        assert recalled.hits.sum() == 0
        assert_slots_hold_the_rows(recalled, cache, tokens, keys, values)
        caches.append(cache)
    assert not torch.equal(caches[0].slot_keys, caches[1].slot_keys)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    shape = Shape(batch=3, kv_len=100)
    keys, values = token_major(shape, torch.float32, device)
    together = empty_cache(keys, num_slots=100)
    alone = [empty_cache(keys[row : row + 1], num_slots=100) for row in range(3)]
    for step in range(3):
        tokens = drifting_selection(shape, 6, 16, step, device)
        result = recall(keys, values, select(tokens), together)
        for row in range(3):
            part = slice(row, row + 1)
            single = recall(keys[part], values[part], select(tokens[part]), alone[row])
            assert all(torch.equal(a[part], b) for a, b in zip(result, single, strict=True))
    for row in range(3):
        assert torch.equal(together.slot_indices[row], alone[row].slot_indices[0])


@pytest.mark.usefixtures("num_threads")
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    shape = Shape(kv_len=2000)
    keys, values = token_major(shape, torch.bfloat16, torch.device("cpu"))
    caches = [empty_cache(keys, num_slots=2000) for _ in range(2)]
    for step in range(3):
        tokens = drifting_selection(shape, 6, 300, step, torch.device("cpu"))
        results = []
        for threads, cache in zip((1, 2), caches, strict=True):
            torch.set_num_threads(threads)
            results.append(recall(keys, values, select(tokens), cache))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert_same_state(*caches)


def test_a_full_cache_is_refused(device: torch.device) -> None:
    """A raw operator that finds no free slot must not write anywhere else."""
    if device.type == "cuda":
        pytest.skip("an operator can't raise from the device on CUDA")
    keys, values = token_major(Shape(1, 1, 1, 50, 1, 8), torch.float32, device)
    cache = empty_cache(keys, num_slots=4)
    cache.slot_indices.copy_(torch.arange(40, 44, dtype=torch.int32))
    tokens = torch.arange(3, dtype=torch.int32).view(1, 1, 3)
    with pytest.raises(RuntimeError):
        ops.recall(keys, values, tokens, *cache, 9)
    recall(keys, values, select(tokens[:, :, :2]), empty_cache(keys, num_slots=4))


def test_opcheck(device: torch.device) -> None:
    shape = Shape(kv_len=40)
    keys, values = token_major(shape, torch.float32, device)
    cache = empty_cache(keys, num_slots=40)
    tokens = drifting_selection(shape, 6, 8, 0, device)
    torch.library.opcheck(ops.recall, (keys, values, tokens, *cache, 1))


def test_the_verb_compiles_without_a_graph_break(device: torch.device) -> None:
    def program(
        keys: Tensor, values: Tensor, selection: TokenSelection, cache: RecallCache
    ) -> RecalledTokens:
        return recall(keys, values, selection, cache)

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    caches: list[RecallCache] = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, kv_len in enumerate((60, 75, 90)):
            shape = Shape(kv_len=kv_len, head_dim=32)
            keys, values = token_major(shape, torch.float32, device)
            caches = caches or [empty_cache(keys, num_slots=100) for _ in range(2)]
            selection = select(drifting_selection(shape, 6, 8, step, device))
            actual = compiled(keys, values, selection, caches[0])
            expected = program(keys, values, selection, caches[1])
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
            assert_same_state(*caches)
