"""The graph rewrite: find attention sites (sites), replace them (rewrite), run them (runtime)."""

from clusterkv_ops.graphs.backend import ClusterKVBackend, clusterkv_backend, named_backend
from clusterkv_ops.graphs.explain import ClusterKVStats

__all__ = ["ClusterKVBackend", "ClusterKVStats", "clusterkv_backend", "named_backend"]
