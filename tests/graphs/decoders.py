"""Small decoders without transformers, one for each way to keep a KV cache by hand.

Each is called as `decoder(tokens, position, cache) -> (logits, cache)`, with `position` as its
idiom wants it: an integer, or the tensor of the new tokens' places.

Shapes: B batch, H query heads, K KV heads, n new tokens, T cached tokens, L places of a buffer,
D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

BATCH, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY, LAYERS = 2, 4, 2, 16, 64, 61, 2
CAPACITY = 512
Cache = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """The projections of one layer. `attention` replaces the call of SDPA where it is set."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.attention: Callable[..., tuple[Tensor, None]] | None = None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, H, n, D], key and value [B, K, n, D]."""
        batch, num_new, _ = x.shape
        joint = self.qkv(x).view(batch, num_new, HEADS + 2 * KV_HEADS, HEAD_DIM).transpose(1, 2)
        query, key, value = joint.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        return query, key, value

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        """SDPA with grouped heads, or what stands in for it."""
        if self.attention is not None:
            mask = options.get("attn_mask")
            return self.attention(self, query, keys, values, mask)[0].transpose(1, 2)
        return sdpa(query, keys, values, enable_gqa=True, **options)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x).relu()


class Decoder(nn.Module):
    """A decoder whose `cached` says how a layer keeps its keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CAPACITY, WIDTH)
        self.layers = nn.ModuleList(Block(number) for number in range(LAYERS))
        self.register_buffer("causal", torch.ones(CAPACITY, CAPACITY, dtype=torch.bool).tril())

    def forward(
        self, tokens: Tensor, position: Any, cache: Cache
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        where = position
        if not isinstance(position, Tensor):
            where = torch.arange(position, position + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.places(where)
        kept = []
        for number, block in enumerate(self.layers):
            past = cache[number] if cache else None
            attended, present = self.cached(block, *block.project(x), position, past)
            kept.append(present)
            x = block.finish(x, attended)
        return x @ self.embedding.weight.T, kept

    def cached(
        self, block: Any, query: Tensor, key: Tensor, value: Tensor, position: Any, past: Any
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attention over the cache with the new tokens, and the new cache."""
        raise NotImplementedError

    def empty(self) -> Cache:
        """The cache of a new conversation."""
        return self.zeros(BATCH, KV_HEADS, 0, HEAD_DIM)

    def zeros(self, *shape: int) -> Cache:
        """Keys and values of a shape for every layer."""
        new = self.embedding.weight.new_zeros
        return [(new(shape).detach(), new(shape).detach()) for _ in self.layers]

    def position(self, start: int, num_new: int) -> Any:
        """How this decoder wants to be told where the new tokens go."""
        return start

    def cropped(self, cache: Cache, length: int) -> Cache:
        """The cache of the first `length` tokens."""
        return [(k[:, :, :length], v[:, :, :length]) for k, v in cache]


def _causal_options(decoder: Decoder, num_new: int, num_past: Any) -> dict[str, Any]:
    """Options of SDPA without a mask wherever none is needed."""
    if num_new == 1:
        return {}
    if num_past == 0:
        return {"is_causal": True}
    return {"attn_mask": decoder.causal[num_past : num_past + num_new, : num_past + num_new]}


class CatDecoder(Decoder):
    """`torch.cat` of past and new tokens; the new cache is returned."""

    def cached(self, block, query, key, value, position, past):  # type: ignore[no-untyped-def]
        keys, values = torch.cat([past[0], key], 2), torch.cat([past[1], value], dim=-2)
        options = _causal_options(self, query.shape[2], past[0].shape[2])
        return block.attend(query, keys, values, **options), (keys, values)


class NoneDecoder(CatDecoder):
    """The same, where the first call has no cache at all."""

    def cached(self, block, query, key, value, position, past):  # type: ignore[no-untyped-def]
        if past is not None:
            return super().cached(block, query, key, value, position, past)
        attended = block.attend(query, key, value, is_causal=query.shape[2] > 1)
        return attended, (key, value)

    def empty(self) -> Cache:
        return []


class TransposedCatDecoder(Decoder):
    """`torch.cat` of caches [B, T, K, D], transposed for attention."""

    def cached(self, block, query, key, value, position, past):  # type: ignore[no-untyped-def]
        options = _causal_options(self, query.shape[2], past[0].shape[1])
        keys = torch.cat([past[0], key.transpose(1, 2)], dim=1)
        values = torch.cat([past[1], value.transpose(1, 2)], dim=1)
        seen = (keys.transpose(1, 2), values.transpose(1, 2))
        return block.attend(query, *seen, **options), (keys, values)

    def empty(self) -> Cache:
        return self.zeros(BATCH, 0, KV_HEADS, HEAD_DIM)

    def cropped(self, cache: Cache, length: int) -> Cache:
        return [(k[:, :length], v[:, :length]) for k, v in cache]


class AlibiDecoder(Decoder):
    """`torch.cat`, and an additive mask that is another one for each head."""

    def cached(self, block, query, key, value, position, past):  # type: ignore[no-untyped-def]
        keys, values = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        num_new, kv_len = query.shape[2], keys.shape[2]
        asking = torch.arange(kv_len - num_new, kv_len)[:, None]
        distance = asking - torch.arange(kv_len)
        slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)[:, None, None]
        mask = (-slopes * distance).masked_fill(distance < 0, float("-inf")).to(query.dtype)
        return block.attend(query, keys, values, attn_mask=mask), (keys, values)


class BufferDecoder(Decoder):
    """Caches are buffers of fixed length that the model writes; a new token goes to `position`."""

    def empty(self) -> Cache:
        return self.zeros(BATCH, KV_HEADS, CAPACITY, HEAD_DIM)

    def cropped(self, cache: Cache, length: int) -> Cache:
        return cache


class SliceDecoder(BufferDecoder):
    """Assignment to a slice, attention over the tokens up to its end."""

    def cached(self, block, query, key, value, position, past):  # type: ignore[no-untyped-def]
        end = position + query.shape[2]
        options = _causal_options(self, query.shape[2], position)
        past[0][:, :, position:end] = key
        past[1][:, :, position:end] = value
        return block.attend(query, past[0][:, :, :end], past[1][:, :, :end], **options), past


class BatchSliceDecoder(BufferDecoder):
    """Buffers [B, L, K, D], and the rows in use are cut out of them as well (Meta's Llama)."""

    def cached(self, block, query, key, value, position, past):  # type: ignore[no-untyped-def]
        batch, end = query.shape[0], position + query.shape[2]
        options = _causal_options(self, query.shape[2], position)
        for buffer, new in zip(past, (key, value), strict=True):
            buffer[:batch, position:end] = new.transpose(1, 2)
        keys, values = (buffer[:batch, :end].transpose(1, 2) for buffer in past)
        return block.attend(query, keys, values, **options), past

    def empty(self) -> Cache:
        return self.zeros(BATCH, CAPACITY, KV_HEADS, HEAD_DIM)


class NarrowDecoder(BufferDecoder):
    """`narrow(...).copy_(...)`."""

    def cached(self, block, query, key, value, position, past):  # type: ignore[no-untyped-def]
        num_new = query.shape[2]
        options = _causal_options(self, num_new, position)
        for buffer, new in zip(past, (key, value), strict=True):
            buffer.narrow(2, position, num_new).copy_(new)
        keys, values = (buffer.narrow(2, 0, position + num_new) for buffer in past)
        return block.attend(query, keys, values, **options), past


class IndexCopyDecoder(BufferDecoder):
    """`index_copy_`, and a boolean mask over the whole buffer."""

    def cached(self, block, query, key, value, position, past):  # type: ignore[no-untyped-def]
        past[0].index_copy_(2, position, key)
        past[1].index_copy_(2, position, value)
        return block.attend(query, *past, attn_mask=self.causal[position]), past

    def position(self, start: int, num_new: int) -> Any:
        return torch.arange(start, start + num_new)


class GptFastDecoder(IndexCopyDecoder):
    """Buffers of the module, index assignment, repeated KV heads, a mask indexed by position."""

    def __init__(self) -> None:
        super().__init__()
        shape = (BATCH, KV_HEADS, CAPACITY, HEAD_DIM)
        for block in self.layers:
            block.register_buffer("k_cache", torch.zeros(shape))
            block.register_buffer("v_cache", torch.zeros(shape))

    def cached(self, block, query, key, value, position, past):  # type: ignore[no-untyped-def]
        k_out, v_out = block.k_cache, block.v_cache
        k_out[:, :, position] = key
        v_out[:, :, position] = value
        mask = self.causal[None, None, position]
        if block.attention is not None:
            return block.attend(query, k_out, v_out, attn_mask=mask), (k_out, v_out)
        repeats = HEADS // KV_HEADS
        keys, values = (x.repeat_interleave(repeats, dim=1) for x in (k_out, v_out))
        return sdpa(query, keys, values, attn_mask=mask, dropout_p=0.0), (k_out, v_out)

    def empty(self) -> Cache:
        return []

    def forward(self, tokens: Tensor, position: Any, cache: Cache) -> tuple[Tensor, Cache]:
        return super().forward(tokens, position, [])[0], []


DECODERS: dict[str, type[Decoder]] = {
    "cat": CatDecoder,
    "cat, none at first": NoneDecoder,
    "cat, transposed": TransposedCatDecoder,
    "cat, alibi": AlibiDecoder,
    "slice": SliceDecoder,
    "slice, rows in use": BatchSliceDecoder,
    "narrow": NarrowDecoder,
    "index_copy": IndexCopyDecoder,
    "gpt-fast": GptFastDecoder,
}


def make(name: str, seed: int = 0) -> Decoder:
    """A decoder with random weights, the same for a seed; its attention is far from uniform."""
    torch.manual_seed(seed)
    decoder = DECODERS[name]().eval()
    for block in decoder.layers:
        block.qkv.weight.data[: (HEADS + KV_HEADS) * HEAD_DIM] *= 3.0
    return decoder
