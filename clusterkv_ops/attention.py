"""Attention: one query token over sinks, selected tokens and recent tokens, in one pass.

    query [B,Hq,1,D], keys, values [B,Hkv,T,D], selection --> out [B,Hq,1,D], lse [B,Hq,1]

B batch, Hq / Hkv query / key-value heads, T cached tokens, S selected tokens, N slots, D head_dim;
Hs, the selecting heads, is Hq or Hkv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clusterkv_ops import schemas as _schemas  # noqa: F401  (defines the operators)
from clusterkv_ops.recall import check_cache
from clusterkv_ops.types import AttentionState, RecallCache, RecalledTokens, TokenSelection
from clusterkv_ops.validation import (
    FLOATS,
    check_at_least,
    check_device,
    check_keys,
    check_positions,
    check_query,
    check_same,
    check_shape,
    check_tensor,
    check_type,
    error,
    is_readable,
)


def selected_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: TokenSelection,
    *,
    spans: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    recalled: RecalledTokens | None = None,
    cache: RecallCache | None = None,
) -> AttentionState:
    """Attend to two spans of tokens and to a selection, reading K and V where they lie.

    Each attended token is counted as often as it is named, so the spans and the selection must be
    disjoint. Where no token is attended, the output is 0 and the lse -inf. With an empty selection
    (S = 0) and a span over everything this is dense attention.

    Args:
        query: ``[B, Hq, 1, D]`` float32, bfloat16 or float16; Hq a multiple of Hkv.
        keys, values: ``[B, Hkv, T, D]`` in the query's dtype; any strides of B, Hkv and T, and
            nothing is copied.
        selection: ``indices [B, Hs, S]`` int32, Hs = Hq or Hkv; -1 is skipped.
        spans: ``[B, 2, 2]`` int32, begin and end of the sinks and of the recent tokens, see
            `always_attended`. An empty span begins where it ends.
        mask: ``[B, 1, 1, T]`` or ``[B, Hq, 1, T]``, bool (True attends) or floating (added to the
            logits); read at the attended tokens only.
        scale: of the logits, ``1 / sqrt(D)`` by default.
        recalled, cache: where `recall` put the selected tokens; both or neither. The selected rows
            are then read from the cache's slots, with the same result to the last bit.

    Returns:
        AttentionState: the output in the query's dtype, and the lse to merge it by.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a shape, dtype, span or position is wrong.

    Note:
        Deterministic for any number of threads; accumulates in float32. Not differentiable.
        Contents of `spans` and `selection` are checked in eager mode only.

    Source:
        ClusterKV (arXiv:2412.03213), section 3.3; online softmax as in FlashAttention-2
        (arXiv:2307.08691).

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> keys, values = torch.randn(2, 1, 2, 100, 64, generator=generator)
        >>> query = torch.randn(1, 6, 1, 64, generator=generator)
        >>> selection = TokenSelection(
        ...     torch.tensor([[[40, 41, -1], [50, 60, 70]]], dtype=torch.int32),
        ...     torch.tensor([[2, 3]], dtype=torch.int32),
        ... )
        >>> spans = always_attended(100, num_sink_tokens=16, num_recent_tokens=20)
        >>> out, lse = selected_attention(query, keys, values, selection, spans=spans)
        >>> out.shape, lse.shape
        (torch.Size([1, 6, 1, 64]), torch.Size([1, 6, 1]))
    """
    check_keys("keys", keys)
    check_tensor("values", values, keys.dtype)
    check_shape("values", values, *keys.shape)
    check_device("values", values, "keys", keys)
    batch, num_kv_heads, kv_len, head_dim = keys.shape
    check_query(query, num_kv_heads, batch, head_dim)
    check_same("query", query, "keys", keys)
    check_type("selection", selection, TokenSelection)
    _check_selection(selection.indices, query, keys)
    _check_spans(spans, keys)
    if mask is not None:
        _check_mask(mask, query, kv_len)
    if (recalled is None) != (cache is None):
        raise error("cache", "both recalled and cache, or neither", "one of them")
    slots = slot_keys = slot_values = None
    if recalled is not None and cache is not None:
        check_type("recalled", recalled, RecalledTokens)
        check_cache(cache, keys)
        slots, slot_keys, slot_values = recalled.slots, cache.slot_keys, cache.slot_values
        check_tensor("recalled.slots", slots, torch.int32)
        check_shape("recalled.slots", slots, *selection.indices.shape)
        check_positions("recalled.slots", slots, slot_keys.shape[2])
    if scale is None:
        scale = head_dim**-0.5
    return AttentionState(
        *torch.ops.clusterkv.selected_attention(
            query,
            keys,
            values,
            selection.indices,
            spans,
            mask,
            slots,
            slot_keys,
            slot_values,
            scale,
        )
    )


@torch.library.register_fake("clusterkv::selected_attention")
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    indices: Tensor,
    spans: Tensor,
    mask: Tensor | None,
    slots: Tensor | None,
    slot_keys: Tensor | None,
    slot_values: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    """The attention over the union of two disjoint sets of tokens, from those over each.

    A state without tokens (lse -inf) changes nothing; two of them merge to out 0, lse -inf.

    Args:
        a, b: ``out [B, Hq, 1, D]`` of one dtype, ``lse [B, Hq, 1]`` float32.

    Returns:
        AttentionState: of the same shapes and dtypes.

    Raises:
        TypeError: a field isn't a tensor.
        ValueError: shapes or dtypes disagree.

    Note:
        Deterministic, symmetric in its arguments. Not differentiable.

    Source:
        FlashAttention-2 (arXiv:2307.08691), section 2.3: rescaling of partial softmaxes.

    Example:
        >>> a = AttentionState(torch.full((1, 1, 1, 2), 3.0), torch.zeros(1, 1, 1))
        >>> b = AttentionState(torch.full((1, 1, 1, 2), 7.0), torch.zeros(1, 1, 1))
        >>> merge_states(a, b).out
        tensor([[[[5., 5.]]]])
    """
    check_type("a", a, AttentionState)
    check_type("b", b, AttentionState)
    check_tensor("a.out", a.out, *FLOATS)
    check_shape("a.out", a.out, "B", "Hq", 1, "D")
    check_tensor("b.out", b.out, a.out.dtype)
    check_shape("b.out", b.out, *a.out.shape)
    check_device("b.out", b.out, "a.out", a.out)
    for name, lse in (("a.lse", a.lse), ("b.lse", b.lse)):
        check_tensor(name, lse, torch.float32)
        check_shape(name, lse, *a.out.shape[:3])
        check_device(name, lse, "a.out", a.out)
    return AttentionState(*torch.ops.clusterkv.merge_states(*a, *b))


@torch.library.register_fake("clusterkv::merge_states")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(out_a, memory_format=torch.contiguous_format)
    return out, torch.empty_like(lse_a, memory_format=torch.contiguous_format)


def always_attended(
    kv_len: int,
    *,
    num_sink_tokens: int,
    num_recent_tokens: int,
    batch_size: int = 1,
    device: torch.device | None = None,
) -> Tensor:
    """The spans of rows of equal length: their first and their last tokens, without overlap.

    Args:
        kv_len: T, tokens of each row.
        num_sink_tokens: first tokens to attend to; all of them where T is smaller.
        num_recent_tokens: last tokens to attend to, as far as they aren't sinks.
        batch_size: B, number of rows.
        device: of the result.

    Returns:
        Tensor: ``[B, 2, 2]`` int32.

    Raises:
        TypeError: an argument isn't an int.
        ValueError: an argument is negative.

    Example:
        >>> always_attended(100, num_sink_tokens=16, num_recent_tokens=20)
        tensor([[[  0,  16],
                 [ 80, 100]]], dtype=torch.int32)
    """
    check_at_least("kv_len", kv_len, 0)
    check_at_least("num_sink_tokens", num_sink_tokens, 0)
    check_at_least("num_recent_tokens", num_recent_tokens, 0)
    check_at_least("batch_size", batch_size, 1)
    sinks_end = min(num_sink_tokens, kv_len)
    recent_begin = max(sinks_end, kv_len - num_recent_tokens)
    spans = torch.zeros((batch_size, 2, 2), dtype=torch.int32, device=device)
    spans[:, 0, 1] = sinks_end
    spans[:, 1, 0] = recent_begin
    spans[:, 1, 1] = kv_len
    return spans


def _check_selection(indices: Tensor, query: Tensor, keys: Tensor) -> None:
    check_tensor("selection.indices", indices, torch.int32)
    check_shape("selection.indices", indices, keys.shape[0], "Hs", "S")
    check_device("selection.indices", indices, "keys", keys)
    if indices.shape[1] != query.shape[1] and indices.shape[1] != keys.shape[1]:
        expected = f"{query.shape[1]} or {keys.shape[1]} heads"
        raise error("selection.indices", expected, indices.shape[1])
    check_positions("selection.indices", indices, keys.shape[2])


def _check_spans(spans: Tensor, keys: Tensor) -> None:
    check_tensor("spans", spans, torch.int32)
    check_shape("spans", spans, keys.shape[0], 2, 2)
    check_device("spans", spans, "keys", keys)
    if not is_readable():
        return
    begin, end = spans.unbind(dim=-1)
    if bool(((begin < 0) | (begin > end) | (end > keys.shape[2])).any()):
        expected = f"begin and end in order, from 0 to {keys.shape[2]}"
        raise error("spans", expected, spans.tolist())
    is_empty = (begin == end).any(dim=-1)
    if not bool((is_empty | (end[:, 0] <= begin[:, 1])).all()):
        raise error("spans", "sinks that end before the recent tokens begin", spans.tolist())


def _check_mask(mask: Tensor, query: Tensor, kv_len: int) -> None:
    check_tensor("mask", mask, torch.bool, *FLOATS, has_any_strides=True)
    check_shape("mask", mask, query.shape[0], "1 or Hq", 1, kv_len)
    if mask.shape[1] != 1 and mask.shape[1] != query.shape[1]:
        raise error("mask", f"1 or {query.shape[1]} heads", mask.shape[1])
    check_device("mask", mask, "query", query)
