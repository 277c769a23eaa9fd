"""Every operator in plain PyTorch: the oracle of the tests, and what runs without a kernel.

One function per schema of `schemas.py`, with the operator's positional signature. The code is
meant to be read next to the paper; it is exact, works on any device, and takes its time.
"""

from clusterkv_ops.reference.attention import merge_states, selected_attention
from clusterkv_ops.reference.clustering import (
    assign_clusters,
    cluster_keys,
    extend_index_,
    update_centroids,
)
from clusterkv_ops.reference.recall import recall
from clusterkv_ops.reference.selection import select_clusters

__all__ = [
    "assign_clusters",
    "cluster_keys",
    "extend_index_",
    "merge_states",
    "recall",
    "select_clusters",
    "selected_attention",
    "update_centroids",
]
