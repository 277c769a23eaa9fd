"""The nouns that the four verbs pass to each other.

Shapes: B batch, Hq / Hkv query / key-value heads, T cached tokens, C clusters, S selected tokens,
D head_dim. Every index is int32 and padded with -1 at the end.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ClusterIndex(NamedTuple):
    """Which tokens belong to which cluster, per KV head, in compressed sparse row form.

    Tokens of cluster ``c`` are ``indices[b, h, indptr[b, h, c]:indptr[b, h, c + 1]]``, in
    ascending order. A cluster may be empty; an empty cluster is never selected.

    Attributes:
        centroids: ``[B, Hkv, C, D]`` float32, mean of the raw keys of each cluster.
        indptr: ``[B, Hkv, C + 1]`` int32, starts at 0 and never decreases.
        indices: ``[B, Hkv, T]`` int32, token positions; -1 behind the last clustered token.
    """

    centroids: Tensor
    indptr: Tensor
    indices: Tensor


class TokenSelection(NamedTuple):
    """The tokens that a decode step attends to, besides sinks and recent tokens.

    Attributes:
        indices: ``[B, Hq, S]`` int32 (``head_rule="query_head"``) or ``[B, Hkv, S]``
            (``"kv_head"``): token positions in the order of their clusters' rank, -1 behind them.
        num_selected: ``[B, Hq]`` or ``[B, Hkv]`` int32, how many of ``indices`` are tokens.
    """

    indices: Tensor
    num_selected: Tensor


class RecallCache(NamedTuple):
    """Device-resident rows of K and V, and which token each slot holds. Updated in place.

    Attributes:
        slot_keys, slot_values: ``[B, Hkv, N, D]``, N slots.
        slot_indices: ``[B, Hkv, N]`` int32, the token in each slot, -1 where the slot is free.
        slot_ages: ``[B, Hkv, N]`` int32, steps since the slot's token was last selected.
    """

    slot_keys: Tensor
    slot_values: Tensor
    slot_indices: Tensor
    slot_ages: Tensor


class RecalledTokens(NamedTuple):
    """Where the selected tokens lie in the recall cache, and what the step cost.

    Attributes:
        slots: shape of the selection's ``indices``, int32: the slot of each selected token, or -1.
        hits, misses: ``[B, Hkv]`` int32, distinct tokens found on the device / fetched.
    """

    slots: Tensor
    hits: Tensor
    misses: Tensor


class AttentionState(NamedTuple):
    """A partial softmax: enough to merge with another part of the same row.

    Attributes:
        out: ``[B, Hq, 1, D]`` in the query's dtype, normalised within this part.
        lse: ``[B, Hq, 1]`` float32, natural log of the sum of exponentials; -inf for no token.
    """

    out: Tensor
    lse: Tensor
