"""The attention kernels: tiles, splits and head groups, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clusterkv_ops import reference
from tests.ops.inputs import (
    DTYPES,
    Shape,
    assert_as_good_as,
    query_for,
    random,
    random_selection,
    token_major,
)

CPU = torch.device("cpu")
SHAPES = [
    Shape(batch=1, group=1, kv_len=100),
    Shape(group=3, kv_len=300, head_dim=128),
    Shape(batch=1, heads=1, group=7, kv_len=500, head_dim=80),
    Shape(batch=1, heads=1, group=8, kv_len=257, head_dim=256),
    Shape(batch=1, heads=1, group=40, kv_len=70, head_dim=36),
    Shape(batch=1, heads=1, group=2, kv_len=1, head_dim=5),
]


def exact_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The same attention in float64, written a second time."""
    query, keys, values, indices, spans, mask, _, _, _, scale = arguments
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float64)
    for row, head in torch.cartesian_prod(*map(torch.arange, query.shape[:2])).tolist():
        kv_head = head * keys.shape[1] // query.shape[1]
        listed = indices[row, head * indices.shape[1] // query.shape[1]]
        tokens = [torch.arange(*span) for span in spans[row].tolist()]
        tokens = torch.cat([*tokens, listed[listed >= 0]]).long()
        logits = keys[row, kv_head, tokens].double() @ query[row, head, 0].double() * scale
        if mask is not None:
            shown = mask[row, head % mask.shape[1], 0, tokens]
            is_bool = shown.dtype == torch.bool
            logits = logits.masked_fill(~shown, -torch.inf) if is_bool else logits + shown.double()
        lse[row, head] = torch.logsumexp(logits, 0)
        if lse[row, head] > -torch.inf:
            weights = (logits - lse[row, head]).exp()
            out[row, head, 0] = weights @ values[row, kv_head, tokens].double()
    return out, lse


def spans_of(shape: Shape, sinks: int, recent: int) -> Tensor:
    begin = max(min(sinks, shape.kv_len), shape.kv_len - recent)
    spans = [[0, min(sinks, shape.kv_len)], [begin, shape.kv_len]]
    return torch.tensor([spans] * shape.batch, dtype=torch.int32)


def arguments(shape: Shape, dtype: torch.dtype, *, per_query_head: bool = False) -> list[Any]:
    keys, values = token_major(shape, dtype, CPU)
    heads = shape.heads * (shape.group if per_query_head else 1)
    indices = random_selection(shape, heads, min(60, shape.kv_len), CPU)
    spans = spans_of(shape, 0, 0)
    query = query_for(shape, dtype, CPU)
    return [query, keys, values, indices, spans, None, None, None, None, shape.head_dim**-0.5]


def assert_matches(emulated: Any, given: list[Any]) -> None:
    exact_out, exact_lse = exact_attention(*given)
    out, lse = emulated.selected_attention(*given)
    low_out, low_lse = reference.selected_attention(*given)
    assert_as_good_as(out, low_out, exact_out)
    finite = exact_lse > -torch.inf
    assert_as_good_as(lse[finite], low_lse[finite], exact_lse[finite])
    assert torch.equal(lse[~finite], low_lse[~finite])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("per_query_head", [False, True])
def test_selection_matches(
    emulated: Any, dtype: torch.dtype, shape: Shape, per_query_head: bool
) -> None:
    assert_matches(emulated, arguments(shape, dtype, per_query_head=per_query_head))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_len", [63, 64, 65, 1000, 5000])
def test_dense_decode_over_many_splits_matches(
    emulated: Any, dtype: torch.dtype, kv_len: int
) -> None:
    shape = Shape(batch=1, heads=1, group=3, kv_len=kv_len)
    given = arguments(shape, dtype)
    given[3] = torch.empty(1, 1, 0, dtype=torch.int32)
    given[4] = spans_of(shape, 0, kv_len)
    assert_matches(emulated, given)


@pytest.mark.parametrize("kind", ["bool", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("per_head", [False, True])
def test_masks_match(emulated: Any, kind: str, per_head: bool) -> None:
    shape = Shape(group=4, kv_len=200)
    given = arguments(shape, torch.float16)
    given[3] = torch.where(given[3] < 30, -1, given[3])
    given[4] = spans_of(shape, 16, 14)
    size = (2, 8 if per_head else 1, 1, 200)
    mask = random(*size, dtype=torch.float32, device=CPU, seed=5)
    given[5] = mask > 0 if kind == "bool" else mask.to(getattr(torch, kind))
    given[5][0] = False if kind == "bool" else -torch.inf  # a row that sees nothing
    assert_matches(emulated, given)


def test_rows_that_nobody_may_see_are_not_used(emulated: Any) -> None:
    shape = Shape(kv_len=120)
    given = arguments(shape, torch.float32)
    given[3] = torch.empty(2, 2, 0, dtype=torch.int32)
    given[4] = spans_of(shape, 0, 120)
    given[5] = torch.ones(2, 1, 1, 120, dtype=torch.bool)
    given[5][:, :, :, 50:] = False
    expected = emulated.selected_attention(*given)
    for tensor in given[1:3]:
        tensor[:, :, 50:] = torch.nan
    actual = emulated.selected_attention(*given)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_give_the_same_bits(emulated: Any, dtype: torch.dtype) -> None:
    shape = Shape(kv_len=200, head_dim=96)
    given = arguments(shape, dtype)
    given[4] = spans_of(shape, 3, 5)
    expected = emulated.selected_attention(*given)
    tokens, slots = given[3], torch.full_like(given[3], -1)
    slot_keys, slot_values = torch.full((2, shape.batch, shape.heads, 77, 96), torch.nan).to(dtype)
    for row, head, place in (tokens >= 0).nonzero().tolist():
        slot = (place * 5 + head) % 77
        slots[row, head, place] = slot
        slot_keys[row, head, slot] = given[1][row, head, tokens[row, head, place]]
        slot_values[row, head, slot] = given[2][row, head, tokens[row, head, place]]
    given[6:9] = slots, slot_keys, slot_values
    actual = emulated.selected_attention(*given)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def test_a_row_does_not_depend_on_its_neighbours_or_on_slack(emulated: Any) -> None:
    shape = Shape(batch=3, kv_len=2000)
    query, keys, values, indices, spans, *rest = arguments(shape, torch.bfloat16)
    spans = torch.tensor([[[0, 16], [1000 - 300 * row, 1500]] for row in range(3)])
    spans = spans.to(torch.int32)
    together = emulated.selected_attention(query, keys, values, indices, spans, *rest)
    indices = torch.where(indices < 1500, indices, -1)
    together = emulated.selected_attention(query, keys, values, indices, spans, *rest)
    for row in range(3):
        own = [tensor[row : row + 1] for tensor in (query, keys, values, indices, spans)]
        own[1:3] = [tensor[:, :, :1500] for tensor in own[1:3]]
        alone = emulated.selected_attention(*own, *rest)
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])


def test_positions_outside_are_skipped(emulated: Any) -> None:
    shape = Shape(kv_len=50)
    given = arguments(shape, torch.float32)
    expected = emulated.selected_attention(*given)
    given[3] = torch.cat([given[3], torch.tensor([50, 2**31 - 1, -7]).int().expand(2, 2, 3)], 2)
    given[4] = torch.tensor([[[9, 3], [60, 70]], [[-5, 0], [50, 2**31 - 1]]], dtype=torch.int32)
    actual = emulated.selected_attention(*given)
    torch.testing.assert_close(actual[0], expected[0])


def test_unaligned_rows_match(emulated: Any) -> None:
    shape = Shape(kv_len=90, head_dim=64)
    given = arguments(shape, torch.bfloat16)
    expected = emulated.selected_attention(*given)
    for place in (1, 2):
        wide = torch.zeros(2, 2, 90, 67, dtype=torch.bfloat16)
        wide[..., 1:65] = given[place]
        given[place] = wide[..., 1:65]
    actual = emulated.selected_attention(*given)
    assert torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_states_matches(emulated: Any, dtype: torch.dtype) -> None:
    outs = random(2, 2, 6, 1, 64, dtype=dtype, device=CPU)
    lses = random(2, 2, 6, 1, dtype=torch.float32, device=CPU, seed=1)
    lses[0, 0, 0] = lses[:, 1, 1] = -torch.inf
    given = [outs[0], lses[0], outs[1], lses[1]]
    actual, expected = emulated.merge_states(*given), reference.merge_states(*given)
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1])
