"""Attention over spans and a selection, and the merge of partial softmaxes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from clusterkv_ops import (
    AttentionState,
    TokenSelection,
    always_attended,
    empty_cache,
    merge_states,
    recall,
    reference,
    selected_attention,
)
from clusterkv_ops.schemas import has_cpu_kernels
from tests.ops.inputs import (
    DTYPES,
    SHAPES,
    Shape,
    assert_as_good_as,
    generator,
    query_for,
    random,
    random_selection,
    token_major,
)

ops = torch.ops.clusterkv


def select(tokens: Tensor) -> TokenSelection:
    return TokenSelection(tokens, (tokens >= 0).sum(dim=-1, dtype=torch.int32))


def nothing(batch: int, heads: int, device: torch.device) -> TokenSelection:
    return select(torch.empty(batch, heads, 0, dtype=torch.int32, device=device))


def spans_of(*rows: list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


def count_attended(kv_len: int, tokens: Tensor, spans: Tensor, num_qo_heads: int) -> Tensor:
    """`[B, Hq, T]`: how often each token is attended to."""
    batch, heads, _ = tokens.shape
    counts = torch.zeros(batch, num_qo_heads, kv_len, dtype=torch.float64)
    for row in range(batch):
        for begin, end in spans[row].tolist():
            counts[row, :, begin:end] += 1
        for head in range(num_qo_heads):
            chosen = tokens[row, head * heads // num_qo_heads].cpu().long()
            counts[row, head] += torch.bincount(chosen[chosen >= 0], minlength=kv_len)
    return counts.to(tokens.device)


def masked_softmax(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, dtype: torch.dtype
) -> AttentionState:
    """Attention over all tokens in `dtype` with an additive bias `[B, Hq, T]`, written out."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.to(dtype).repeat_interleave(group, 1) for tensor in (keys, values))
    logits = (query.to(dtype) @ keys.transpose(-1, -2)).squeeze(2) * query.shape[-1] ** -0.5
    logits = logits + bias.to(dtype)
    weights = logits.softmax(dim=-1)
    return AttentionState(weights.unsqueeze(2) @ values, logits.logsumexp(dim=-1, keepdim=True))


def assert_attends(
    state: AttentionState, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> None:
    """The state is that of a softmax over all tokens with a bias, where -inf hides a token."""
    assert state.out.dtype == query.dtype
    assert state.lse.dtype == torch.float32
    exact = masked_softmax(query, keys, values, bias, torch.float64)
    low = masked_softmax(query, keys, values, bias, query.dtype)
    assert_as_good_as(state.out, low.out, exact.out, addends=values)
    low = masked_softmax(query, keys, values, bias, torch.float32)
    assert_as_good_as(state.lse, low.lse, exact.lse)


@pytest.mark.parametrize("per_query_head", [True, False], ids=["query_head", "kv_head"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_matches_the_oracle(
    device: torch.device, dtype: torch.dtype, shape: Shape, per_query_head: bool
) -> None:
    keys, values = token_major(shape, dtype, device)
    query = query_for(shape, dtype, device)
    heads = shape.heads * (shape.group if per_query_head else 1)
    sinks, recent = min(5, shape.kv_len), max(5, shape.kv_len - 11)
    tokens = random_selection(shape, heads, (recent - sinks) // 3 + 4, device, first=sinks)
    tokens = tokens.where(tokens < recent, -1)
    spans = spans_of(
        *[[[0, sinks], [min(recent, shape.kv_len), shape.kv_len]]] * shape.batch, device=device
    )
    bias = count_attended(shape.kv_len, tokens, spans, query.shape[1]).log()
    arguments = (query, keys, values, tokens, spans, None, None, None, None, shape.head_dim**-0.5)
    for implementation in (ops.selected_attention, reference.selected_attention):
        assert_attends(AttentionState(*implementation(*arguments)), query, keys, values, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_selection_of_everything_equals_dense_attention(
    device: torch.device, dtype: torch.dtype, shape: Shape
) -> None:
    """Keystone: sinks, recent tokens and every token between them, in any order."""
    keys, values = token_major(shape, dtype, device)
    query = query_for(shape, dtype, device)
    spans = always_attended(
        shape.kv_len,
        num_sink_tokens=16,
        num_recent_tokens=9,
        batch_size=shape.batch,
        device=device,
    )
    begin, end = int(spans[0, 0, 1]), int(spans[0, 1, 0])
    order = torch.randperm(end - begin, generator=generator(0)).int() + begin
    tokens = order.expand(shape.batch, query.shape[1], -1).contiguous().to(device)
    state = selected_attention(query, keys, values, select(tokens), spans=spans)
    exact = scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), enable_gqa=True
    )
    low = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    assert_as_good_as(state.out, low, exact, addends=values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, Shape(1, 1, 9, 5000, 1, 64)], ids=str)
def test_spans_over_everything_are_dense_attention(
    device: torch.device, dtype: torch.dtype, shape: Shape
) -> None:
    keys, values = token_major(shape, dtype, device)
    query = query_for(shape, dtype, device)
    selection = nothing(shape.batch, shape.heads, device)
    spans = spans_of(*[[[0, 0], [0, shape.kv_len]]] * shape.batch, device=device)
    state = selected_attention(query, keys, values, selection, spans=spans)
    bias = torch.zeros(shape.batch, query.shape[1], shape.kv_len, device=device)
    assert_attends(state, query, keys, values, bias)


@pytest.mark.parametrize("per_query_head", [True, False], ids=["query_head", "kv_head"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [33, 64, 128])
def test_reading_from_slots_does_not_change_a_bit(
    device: torch.device, dtype: torch.dtype, head_dim: int, per_query_head: bool
) -> None:
    shape = Shape(kv_len=300, head_dim=head_dim)
    keys, values = token_major(shape, dtype, device)
    query = query_for(shape, dtype, device)
    heads = 6 if per_query_head else 2
    cache = empty_cache(keys, num_slots=300)
    spans = always_attended(
        300, num_sink_tokens=16, num_recent_tokens=20, batch_size=2, device=device
    )
    visible = torch.rand(2, 1, 1, 300, generator=generator(1)).to(device) < 0.8
    for first in (16, 60, 100):
        tokens = random_selection(shape, heads, 60, device, first=first)
        selection = select(tokens.where(tokens < 280, -1))
        recalled = recall(keys, values, selection, cache)
        for mask in (None, visible):
            direct = selected_attention(query, keys, values, selection, spans=spans, mask=mask)
            slotted = selected_attention(
                query,
                keys,
                values,
                selection,
                spans=spans,
                mask=mask,
                recalled=recalled,
                cache=cache,
            )
            assert torch.equal(direct.out, slotted.out)
            assert torch.equal(direct.lse, slotted.lse)


@pytest.mark.parametrize("mask_heads", [1, 6])
@pytest.mark.parametrize("kind", ["bool", "same", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_acts_on_the_attended_tokens(
    device: torch.device, dtype: torch.dtype, kind: str, mask_heads: int
) -> None:
    shape = Shape(kv_len=120)
    keys, values = token_major(shape, dtype, device)
    query = query_for(shape, dtype, device)
    tokens = random_selection(shape, 6, 40, device, first=10)
    tokens = tokens.where(tokens < 100, -1)
    spans = spans_of([[0, 10], [100, 120]], [[2, 9], [100, 118]], device=device)
    numbers = random(2, mask_heads, 1, 120, dtype=torch.float32, device=device, seed=5)
    if kind == "bool":
        mask = numbers < 0.5
        bias = torch.where(mask, 0.0, -torch.inf)
    else:
        mask = bias = numbers.masked_fill(numbers > 1, -torch.inf).to(
            dtype if kind == "same" else torch.float32
        )
    state = selected_attention(query, keys, values, select(tokens), spans=spans, mask=mask)
    counts = count_attended(120, tokens, spans, 6)
    assert_attends(state, query, keys, values, counts.log() + bias.squeeze(2).double())


def test_a_broadcast_mask_is_read_through_its_strides(device: torch.device) -> None:
    shape = Shape(kv_len=70)
    keys, values = token_major(shape, torch.float32, device)
    query, selection = query_for(shape, torch.float32, device), nothing(2, 2, device)
    spans = spans_of(*[[[0, 70], [70, 70]]] * 2, device=device)
    row = torch.rand(1, 1, 1, 140, generator=generator(0)).to(device)[..., ::2] < 0.5
    mask = row.expand(2, 6, 1, 70)
    strided = selected_attention(query, keys, values, selection, spans=spans, mask=mask)
    plain = selected_attention(query, keys, values, selection, spans=spans, mask=mask.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_token_gives_zero_and_minus_infinity(device: torch.device, dtype: torch.dtype) -> None:
    """Row 0 names no token; row 1 names some and its mask hides them all."""
    shape = Shape(kv_len=50)
    keys, values = token_major(shape, dtype, device)
    query = query_for(shape, dtype, device)
    tokens = torch.full((2, 6, 4), -1, dtype=torch.int32, device=device)
    tokens[1] = torch.arange(20, 24, device=device)
    spans = spans_of([[0, 0], [50, 50]], [[0, 3], [40, 50]], device=device)
    visible = torch.zeros(2, 1, 1, 50, dtype=torch.bool, device=device)
    for mask in (visible, torch.where(visible, 0.0, -torch.inf)):
        out, lse = selected_attention(query, keys, values, select(tokens), spans=spans, mask=mask)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


def test_what_is_not_attended_is_never_read(device: torch.device) -> None:
    """NaN in every other key, value and place of the mask."""
    shape = Shape(kv_len=90)
    keys, values = token_major(shape, torch.float32, device)
    query = query_for(shape, torch.float32, device)
    tokens = torch.arange(20, 60, 2, dtype=torch.int32, device=device).expand(2, 6, -1)
    spans = spans_of(*[[[0, 7], [80, 85]]] * 2, device=device)
    is_attended = count_attended(90, tokens, spans, 6)[0, 0] > 0
    mask = torch.zeros(2, 1, 1, 90, device=device)
    clean = selected_attention(query, keys, values, select(tokens), spans=spans, mask=mask)
    keys[:, :, ~is_attended] = torch.nan
    values[:, :, ~is_attended] = torch.nan
    mask[..., ~is_attended] = torch.nan
    dirty = selected_attention(query, keys, values, select(tokens), spans=spans, mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_each_token_of_a_step_counts_once(device: torch.device) -> None:
    """Equal logits: each attended value has weight 1 / count, also at the borders of the spans."""
    kv_len = 40
    keys = torch.zeros(1, 1, kv_len, kv_len, device=device)
    values = torch.eye(kv_len, device=device).view(1, 1, kv_len, kv_len)
    query = torch.ones(1, 1, 1, kv_len, device=device)
    tokens = torch.tensor([[[4, 29, 12]]], dtype=torch.int32, device=device)
    spans = spans_of([[0, 4], [30, 40]], device=device)
    out, lse = selected_attention(query, keys, values, select(tokens), spans=spans)
    attended = [*range(4), 4, 12, 29, *range(30, 40)]
    assert out.flatten().nonzero().flatten().tolist() == attended
    assert torch.allclose(out.flatten()[attended], torch.tensor(1 / 17, device=device))
    assert torch.allclose(lse, torch.tensor(17.0, device=device).log())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_logits_do_not_overflow(device: torch.device, dtype: torch.dtype) -> None:
    """The largest logit decides, wherever it stands: first, in the middle, last."""
    for peak in (0, 31, 63):
        keys = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
        keys[0, 0, :, 0] = -200
        keys[0, 0, peak, 0] = 200
        values = random(1, 1, 64, 64, dtype=dtype, device=device)
        query = torch.full((1, 2, 1, 64), 100.0, dtype=dtype, device=device)
        spans = spans_of([[0, 64], [64, 64]], device=device)
        selection = nothing(1, 1, device)
        out, lse = selected_attention(query, keys, values, selection, spans=spans, scale=1.0)
        assert torch.equal(out, values[:, :, peak : peak + 1].expand_as(out))
        assert (lse == 20000).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_change_a_bit(device: torch.device, dtype: torch.dtype) -> None:
    shape = Shape(kv_len=200)
    keys, values = token_major(shape, dtype, device)
    query = query_for(shape, dtype, device)
    tokens = random_selection(shape, 6, 40, device, first=16)
    spans = always_attended(
        200, num_sink_tokens=16, num_recent_tokens=0, batch_size=2, device=device
    )
    wide = torch.zeros(2, 2, 200, 71, dtype=dtype, device=device)
    wide[..., 3:67] = keys
    results = [
        selected_attention(q, k, v, select(tokens), spans=spans)
        for q, k, v in (
            (query, keys, values),
            (query.contiguous(), keys.contiguous(), values.contiguous()),
            (query, wide[..., 3:67], values.transpose(1, 2).contiguous().transpose(1, 2)),
        )
    ]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    shape = Shape(batch=3, kv_len=400)
    keys, values = token_major(shape, torch.float32, device)
    query = query_for(shape, torch.float32, device)
    tokens = random_selection(shape, 6, 90, device, first=20)
    tokens = tokens.where(tokens < 300, -1)
    spans = spans_of(
        [[0, 16], [300, 400]], [[0, 0], [390, 400]], [[4, 20], [300, 301]], device=device
    )
    together = selected_attention(query, keys, values, select(tokens), spans=spans)
    for row in range(3):
        part = slice(row, row + 1)
        alone = selected_attention(
            query[part], keys[part], values[part], select(tokens[part]), spans=spans[part]
        )
        if device.type == "cpu" and has_cpu_kernels:
            assert all(torch.equal(a[part], b) for a, b in zip(together, alone, strict=True))
        else:
            assert torch.allclose(together.out[part], alone.out)


@pytest.mark.parametrize("shape", [Shape(kv_len=900), Shape(1, 1, 9, 8000, 1, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("num_threads")
def test_the_number_of_threads_does_not_change_a_bit(shape: Shape, dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    keys, values = token_major(shape, dtype, device)
    query = query_for(shape, dtype, device)
    middle = shape.kv_len // 2
    tokens = random_selection(shape, query.shape[1], middle // 2, device, first=middle)
    everything = spans_of(*[[[0, middle], [shape.kv_len] * 2]] * shape.batch, device=device)
    for selection in (select(tokens), nothing(shape.batch, shape.heads, device)):
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(selected_attention(query, keys, values, selection, spans=everything))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_parts_equal_the_whole(device: torch.device, dtype: torch.dtype) -> None:
    shape = Shape(kv_len=130)
    keys, values = token_major(shape, dtype, device)
    query, selection = query_for(shape, dtype, device), nothing(2, 2, device)

    def attend(begin: int, end: int) -> AttentionState:
        spans = spans_of(*[[[0, 0], [begin, end]]] * 2, device=device)
        return selected_attention(query, keys, values, selection, spans=spans)

    merged = merge_states(attend(0, 41), merge_states(attend(41, 42), attend(42, 130)))
    exact = masked_softmax(query, keys, values, torch.zeros(130, device=device), torch.float64)
    low = merge_in(dtype, query, keys, values)
    assert_as_good_as(merged.out, low, exact.out, addends=values)
    low_lse = masked_softmax(query, keys, values, torch.zeros(130, device=device), torch.float32)
    assert_as_good_as(merged.lse, low_lse.lse, exact.lse)


def merge_in(dtype: torch.dtype, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same three parts, each rounded to `dtype`, weighted in float64 and rounded again."""
    hidden = torch.full((3, 130), -torch.inf, dtype=torch.float64, device=query.device)
    for part, (begin, end) in enumerate(((0, 41), (41, 42), (42, 130))):
        hidden[part, begin:end] = 0
    parts = [masked_softmax(query, keys, values, bias, torch.float64) for bias in hidden]
    weights = torch.stack([part.lse for part in parts]).softmax(dim=0).unsqueeze(-1)
    outs = torch.stack([part.out.to(dtype).double() for part in parts])
    return (weights * outs).sum(dim=0).to(dtype)


def test_merging_with_no_token_changes_nothing(device: torch.device) -> None:
    out = random(2, 6, 1, 64, dtype=torch.float32, device=device)
    lse = random(2, 6, 1, dtype=torch.float32, device=device, seed=1)
    state = AttentionState(out, lse)
    empty = AttentionState(torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    for merged in (merge_states(state, empty), merge_states(empty, state)):
        assert torch.equal(merged.out, out)
        assert torch.allclose(merged.lse, lse)
    neither = merge_states(empty, empty)
    assert (neither.out == 0).all()
    assert (neither.lse == -torch.inf).all()


def test_merging_is_symmetric(device: torch.device) -> None:
    states = [
        AttentionState(
            random(2, 6, 1, 64, dtype=torch.bfloat16, device=device, seed=seed),
            20 * random(2, 6, 1, dtype=torch.float32, device=device, seed=seed + 10),
        )
        for seed in (0, 1)
    ]
    one, other = merge_states(states[0], states[1]), merge_states(states[1], states[0])
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_spans_never_overlap() -> None:
    for kv_len in (0, 5, 16, 20, 100):
        spans = always_attended(kv_len, num_sink_tokens=16, num_recent_tokens=10, batch_size=2)
        (begin, sinks), (recent, end) = spans[1].tolist()
        assert (begin, end) == (0, kv_len)
        assert sinks == min(16, kv_len)
        assert recent == max(sinks, kv_len - 10)


def test_opcheck(device: torch.device) -> None:
    shape = Shape(kv_len=40, head_dim=16)
    keys, values = token_major(shape, torch.float32, device)
    query = query_for(shape, torch.float32, device)
    tokens = random_selection(shape, 6, 9, device, first=4)
    spans = spans_of(*[[[0, 4], [40, 40]]] * 2, device=device)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool, device=device)
    cache = empty_cache(keys, num_slots=40)
    slots = recall(keys, values, select(tokens), cache, recall_steps=0).slots
    arguments = (query, keys, values, tokens, spans)
    torch.library.opcheck(ops.selected_attention, (*arguments, mask, None, None, None, 0.25))
    torch.library.opcheck(
        ops.selected_attention, (*arguments, None, slots, cache.slot_keys, cache.slot_values, 0.25)
    )
    state = selected_attention(query, keys, values, select(tokens), spans=spans)
    torch.library.opcheck(ops.merge_states, (*state, *state))


def test_the_verbs_compile_without_a_graph_break(device: torch.device) -> None:
    def program(query: Tensor, keys: Tensor, values: Tensor, tokens: Tensor) -> AttentionState:
        spans = always_attended(
            keys.shape[2], num_sink_tokens=4, num_recent_tokens=4, batch_size=2, device=keys.device
        )
        state = selected_attention(query, keys, values, select(tokens), spans=spans)
        return merge_states(state, state)

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for kv_len in (60, 75, 90):
            shape = Shape(kv_len=kv_len, head_dim=32)
            keys, values = token_major(shape, torch.float32, device)
            query = query_for(shape, torch.float32, device)
            tokens = random_selection(shape, 6, kv_len // 4, device, first=4)
            actual, expected = (run(query, keys, values, tokens) for run in (compiled, program))
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
