"""Conversations with the decoders of decoders.py, compared by their logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from clusterkv_ops import ClusterKVConfig
from clusterkv_ops.graphs import ClusterKVBackend, clusterkv_backend
from tests.graphs.decoders import BATCH, VOCABULARY, Decoder, make
from tests.graphs.oracle import Oracle

ALL = ClusterKVConfig(budget=4096)
SMALL = ClusterKVConfig(
    budget=40,
    num_sink_tokens=4,
    tokens_per_cluster=8,
    recluster_interval=16,
    clusters_per_interval=2,
    dense_layers=1,
    async_clustering=False,
)


class Talk:
    """One conversation with a decoder, compiled or not: feeds tokens and keeps the cache."""

    def __init__(self, decoder: Decoder, run: Callable[..., Any] | None = None) -> None:
        self.decoder = decoder
        self.run = decoder if run is None else run
        self.length = 0
        self.cache = decoder.empty()

    def feed(self, tokens: Tensor) -> Tensor:
        """Logits [B, n, V] of new tokens [B, n]."""
        position = self.decoder.position(self.length, tokens.shape[1])
        with torch.no_grad():
            logits, self.cache = self.run(tokens, position, self.cache)
        self.length += tokens.shape[1]
        out: Tensor = logits
        return out

    def decode(self, tokens: Tensor) -> Tensor:
        """The same, one token a call."""
        return torch.cat([self.feed(tokens[:, i : i + 1]) for i in range(tokens.shape[1])], 1)

    def again(self) -> Talk:
        """Another conversation with the same decoder."""
        return Talk(self.decoder, self.run)

    def rewind(self, length: int) -> None:
        self.cache = self.decoder.cropped(self.cache, length)
        self.length = length


def tokens(num_tokens: int, seed: int = 0, batch: int = BATCH) -> Tensor:
    """Random token ids [B, n]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, num_tokens), generator=generator)


def plain(name: str) -> Talk:
    """A conversation with an uncompiled decoder."""
    return Talk(make(name))


def compiled(
    name: str, config: ClusterKVConfig, inner: Any = "eager"
) -> tuple[Talk, ClusterKVBackend]:
    """A conversation with a compiled decoder; `talk.again()` makes more of them."""
    torch._dynamo.reset()
    backend = clusterkv_backend(config=config, inner=inner)
    decoder = make(name)
    return Talk(decoder, torch.compile(decoder, backend=backend)), backend


def sparse(name: str, config: ClusterKVConfig) -> tuple[Talk, Oracle]:
    """A conversation with a decoder whose attention is the eager oracle."""
    talk, oracle = plain(name), Oracle(config)
    for block in talk.decoder.layers:
        block.attention = oracle
    return talk, oracle


def difference(seen: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of any logit."""
    return max(float((a - b).abs().max()) for a, b in zip(seen, expected, strict=True))


@cache
def tolerance(name: str) -> float:
    """Twice the error of float32 on its own: uncompiled, against float64."""
    exact = conversation(Talk(make(name).double()))
    return 2 * difference(conversation(plain(name)), exact)


def conversation(talk: Talk) -> list[Tensor]:
    """Logits of a prompt, a chunk, decode steps, decode steps after a rewind, a second request."""
    seen = [talk.feed(tokens(100)), talk.feed(tokens(17, seed=1))]
    seen.append(talk.decode(tokens(24, seed=2)))
    talk.rewind(130)
    seen.append(talk.decode(tokens(9, seed=3)))
    talk.length, talk.cache = 0, talk.decoder.empty()
    seen += [talk.feed(tokens(90, seed=4)), talk.decode(tokens(12, seed=5))]
    return seen
