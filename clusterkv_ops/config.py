"""ClusterKVConfig: every setting of the method, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

HeadRule = Literal["query_head", "kv_head"]


@dataclass(frozen=True)
class ClusterKVConfig:
    """What ClusterKV attention does, from the prompt to the last token.

    Attributes:
        budget: tokens that a decode step attends to, sinks included. The tokens that no cluster
            holds yet (at most `recluster_interval`) are attended on top.
        num_sink_tokens: first tokens of a sequence; never clustered, always attended.
        tokens_per_cluster: tokens of the prompt for each of its clusters.
        recluster_interval: tokens that are collected before they are clustered among themselves.
        clusters_per_interval: clusters that `recluster_interval` tokens are sorted into.
        dense_layers: first layers of the model that attend to everything.
        max_iter: most k-means iterations; it stops earlier when no label changes.
        seed: of the random initial centroids.
        recall_steps: a token stays on the device for this many steps after its last selection
            (with `offload`).
        offload: keep keys and values in host memory and fetch the selected ones.
        async_clustering: cluster beside the model's own work instead of before it. The result is
            the same.
        head_rule: "query_head" lets each query head choose its own tokens; "kv_head" makes one
            choice for all query heads that share a KV head.

    Raises:
        ValueError: a setting is out of its range.
        TypeError: a setting is of the wrong type.

    Source: ClusterKV (arXiv:2412.03213), sections 3 and 4; the defaults are the paper's.

    Example:
        >>> ClusterKVConfig(budget=1024).tokens_per_cluster
        80
        >>> ClusterKVConfig(budget=8)
        Traceback (most recent call last):
        ValueError: budget: expected at least num_sink_tokens + 1 = 17, got 8
    """

    budget: int = 1024
    num_sink_tokens: int = 16
    tokens_per_cluster: int = 80
    recluster_interval: int = 320
    clusters_per_interval: int = 4
    dense_layers: int = 2
    max_iter: int = 20
    seed: int = 0
    recall_steps: int = 1
    offload: bool = False
    async_clustering: bool = True
    head_rule: HeadRule = "query_head"

    @classmethod
    def paper(cls, budget: int = 1024) -> ClusterKVConfig:
        """The published setting at a budget."""
        return cls(budget=budget)

    def __post_init__(self) -> None:
        at_least = {
            "num_sink_tokens": 0,
            "tokens_per_cluster": 1,
            "recluster_interval": 1,
            "clusters_per_interval": 1,
            "dense_layers": 0,
            "max_iter": 1,
            "seed": 0,
            "recall_steps": 0,
        }
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise TypeError(f"{field.name}: expected a bool, got {value!r}")
            elif isinstance(field.default, int):
                if not isinstance(value, int) or isinstance(value, bool):
                    raise TypeError(f"{field.name}: expected an int, got {value!r}")
                low = at_least.get(field.name)
                if low is not None and value < low:
                    raise ValueError(f"{field.name}: expected at least {low}, got {value}")
        if self.budget <= self.num_sink_tokens:
            raise ValueError(
                f"budget: expected at least num_sink_tokens + 1 = {self.num_sink_tokens + 1}, "
                f"got {self.budget}"
            )
        if self.clusters_per_interval > self.recluster_interval:
            raise ValueError(
                f"clusters_per_interval: expected at most recluster_interval = "
                f"{self.recluster_interval}, got {self.clusters_per_interval}"
            )
        if self.head_rule not in get_args(HeadRule):
            raise ValueError(
                f"head_rule: expected one of {', '.join(get_args(HeadRule))}, "
                f"got {self.head_rule!r}"
            )

    @property
    def selected_tokens(self) -> int:
        """Tokens that a selection may return: the budget less the sinks."""
        return self.budget - self.num_sink_tokens
