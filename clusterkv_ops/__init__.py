"""ClusterKV for PyTorch: sparse decoding over clustered keys, for any decoder.

Decoding is four verbs on one data structure: clustering makes a `ClusterIndex` of the cached keys,
selection picks tokens for a query, recall brings them to the device, attention reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch as _torch
except (ImportError, OSError):  # reading traces, and TensorBoard's tab, need no torch
    _torch = None  # type: ignore[assignment]

if TYPE_CHECKING or _torch is not None:
    from clusterkv_ops.attention import always_attended, merge_states, selected_attention
    from clusterkv_ops.clustering import (
        assign_clusters,
        cluster_keys,
        extend_index,
        initial_tokens,
        update_centroids,
    )
    from clusterkv_ops.config import ClusterKVConfig
    from clusterkv_ops.recall import empty_cache, recall
    from clusterkv_ops.selection import select_clusters
    from clusterkv_ops.types import (
        AttentionState,
        ClusterIndex,
        RecallCache,
        RecalledTokens,
        TokenSelection,
    )

if TYPE_CHECKING:
    from clusterkv_ops.graphs import ClusterKVBackend, ClusterKVStats, clusterkv_backend

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "ClusterIndex",
    "ClusterKVBackend",
    "ClusterKVConfig",
    "ClusterKVStats",
    "RecallCache",
    "RecalledTokens",
    "TokenSelection",
    "always_attended",
    "assign_clusters",
    "cluster_keys",
    "clusterkv_backend",
    "empty_cache",
    "extend_index",
    "initial_tokens",
    "merge_states",
    "recall",
    "select_clusters",
    "selected_attention",
    "update_centroids",
]


def __getattr__(name: str) -> Any:
    """The backend, imported when it is first asked for: Dynamo is slow to import."""
    if name in __all__ and _torch is None:
        raise ImportError(f"clusterkv_ops.{name} needs torch, which can't be imported")
    if name not in ("ClusterKVBackend", "ClusterKVStats", "clusterkv_backend"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clusterkv_ops import graphs

    return getattr(graphs, name)
