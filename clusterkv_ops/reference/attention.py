"""Attention of one query token over chosen tokens, and the merge of two partial softmaxes.

Shapes: B batch, H = Hq query heads, G query heads per KV head, T cached tokens, S selected
tokens, D head_dim, A attended places (tokens of both spans, then the selection).
"""

from __future__ import annotations

import torch
from torch import Tensor


def selected_attention(
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
    """Softmax over sinks, recent tokens and the selection; the output and its log-sum-exp."""
    num_qo_heads = query.shape[1]
    in_spans = _tokens_of_spans(spans, keys.shape[2])[:, None].expand(-1, num_qo_heads, -1)
    selected = _per_query_head(indices, num_qo_heads)
    keys_BHAD, values_BHAD = _rows(keys, in_spans), _rows(values, in_spans)
    if slots is None or slot_keys is None or slot_values is None:
        key_source, value_source, places = keys, values, selected
    else:
        key_source, value_source = slot_keys, slot_values
        places = _per_query_head(slots, num_qo_heads)
    keys_BHAD = torch.cat([keys_BHAD, _rows(key_source, places)], dim=2)
    values_BHAD = torch.cat([values_BHAD, _rows(value_source, places)], dim=2)

    logits_BHA = (query.float() @ keys_BHAD.transpose(-1, -2)).squeeze(2) * scale
    is_token = torch.cat([in_spans, torch.minimum(selected, places)], dim=2) >= 0
    if mask is not None:
        logits_BHA = _masked(logits_BHA, mask, torch.cat([in_spans, selected], dim=2))
    logits_BHA = logits_BHA.masked_fill(~is_token, -torch.inf)
    lse = torch.logsumexp(logits_BHA, dim=-1, keepdim=True)
    weights_BHA = torch.where(lse > -torch.inf, (logits_BHA - lse).exp(), 0.0)
    out = weights_BHA.unsqueeze(2) @ values_BHAD
    return out.to(query.dtype), lse


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """The state of the union of two disjoint sets of tokens."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.where(lse_a > -torch.inf, (lse_a - lse).exp(), 0.0).unsqueeze(-1)
    weight_b = torch.where(lse_b > -torch.inf, (lse_b - lse).exp(), 0.0).unsqueeze(-1)
    return (weight_a * out_a.float() + weight_b * out_b.float()).to(out_a.dtype), lse


def _tokens_of_spans(spans: Tensor, kv_len: int) -> Tensor:
    """`[B, A]`: the tokens of both spans of each row, -1 where a row has fewer than another."""
    begins, ends = spans.clamp(0, kv_len).unbind(dim=-1)
    width = int((ends - begins).max()) if spans.numel() else 0
    tokens = begins.unsqueeze(-1) + torch.arange(max(width, 0), device=spans.device)
    return torch.where(tokens < ends.unsqueeze(-1), tokens, -1).flatten(1)


def _per_query_head(choice: Tensor, num_qo_heads: int) -> Tensor:
    """`[B, Hs, S]` to `[B, Hq, S]`: query heads of a group share what was chosen for it."""
    return choice.repeat_interleave(num_qo_heads // choice.shape[1], dim=1)


def _rows(source: Tensor, places: Tensor) -> Tensor:
    """`[B, Hq, A, D]` float32 from `source` [B, Hkv, T, D]; zeros where a place is -1."""
    batch, num_qo_heads, _ = places.shape
    row = torch.arange(batch, device=source.device)[:, None, None]
    head = torch.arange(num_qo_heads, device=source.device)[None, :, None]
    kv_head = head // (num_qo_heads // source.shape[1])
    rows = source[row, kv_head, places.clamp(min=0)].float()
    return rows.masked_fill((places < 0).unsqueeze(-1), 0.0)


def _masked(logits_BHA: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    """Logits under a boolean (True attends) or additive mask [B, 1 or Hq, 1, T]."""
    mask_BHT = mask[:, :, 0].expand(-1, tokens.shape[1], -1)
    at_tokens = mask_BHT.gather(-1, tokens.clamp(min=0).long())
    if mask.dtype == torch.bool:
        return logits_BHA.masked_fill(~at_tokens, -torch.inf)
    return logits_BHA + at_tokens.float()
