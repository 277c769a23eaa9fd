"""`clusterkv_backend(...)`: the Dynamo backend that makes a compiled decoder decode sparsely."""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from collections.abc import Sequence as AnySequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx

from clusterkv_ops.config import ClusterKVConfig
from clusterkv_ops.counters import Counters
from clusterkv_ops.graphs.caches import CacheRegistry, OpenCache
from clusterkv_ops.graphs.explain import ClusterKVStats, SiteReport, table
from clusterkv_ops.graphs.rewrite import SitePlan, copy_of, rewrite_pass
from clusterkv_ops.graphs.runtime import running
from clusterkv_ops.graphs.sites import Site, find_sites, query_length
from clusterkv_ops.ranges import named_range
from clusterkv_ops.sequence import Sequence

log = logging.getLogger(__name__)
Inner = Literal["inductor", "aot_eager", "eager"]
Compiled = Callable[..., Any]


class ClusterKVBackend:
    """A Dynamo backend: rewrites a graph's attention, and keeps the state that it needs.

    Made by `clusterkv_backend`. Use one backend for one model.
    """

    def __init__(self, config: ClusterKVConfig, inner: Inner) -> None:
        self.config = config
        self.inner = inner
        self.__name__ = "clusterkv"
        self._counters = Counters()
        self._reports: list[SiteReport] = []
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._caches = CacheRegistry(self._new_sequence, self._counters)
        weakref.finalize(self, _warn_if_unused, self._counters)

    def __call__(self, gm: fx.GraphModule, example_inputs: AnySequence[Any]) -> Compiled:
        """Compile one graph. Called by Dynamo."""
        self._counters.add(graphs=1)
        _warn_at_recompile_limit()
        rewritten = copy_of(gm)
        sites = find_sites(rewritten.graph)
        self._report(sites)
        chosen = [site for site in sites if not site.reason]
        if not chosen:
            return self._compile(gm, example_inputs)
        layers = [self._layer_of(site, number, sites) for number, site in enumerate(sites)]
        layers = [layer for layer, site in zip(layers, sites, strict=True) if not site.reason]
        num_outputs = len(next(n for n in gm.graph.nodes if n.op == "output").args[0])
        plans, kept = rewrite_pass(rewritten, chosen, layers)
        compiled = self._compile(rewritten, example_inputs)
        return _RewrittenGraph(compiled, plans, kept, num_outputs, self._caches)

    def stats(self) -> ClusterKVStats:
        """What happened so far. Waits for the device where a count lives on one."""
        counts = self._counters.snapshot()
        alive = list(self._caches.sequences())
        return replace(
            ClusterKVStats(**counts),
            num_clusters=max((s.num_clusters for s, _ in alive), default=0),
            kv_bytes=sum(record.num_bytes for _, record in alive),
            index_bytes=sum(s.index_bytes for s, _ in alive),
        )

    def explain(self) -> str:
        """A table of every attention call: where it is, its cache, rewritten or why not."""
        return table(self._reports)

    def _compile(self, gm: fx.GraphModule, example_inputs: AnySequence[Any]) -> Compiled:
        if self.inner == "eager":
            return gm.forward
        from torch._dynamo.backends.registry import lookup_backend  # slow to import

        compiled: Compiled = lookup_backend(self.inner)(gm, list(example_inputs))
        return compiled

    def _layer_of(self, site: Site, number: int, sites: list[Site]) -> int:
        """The site's layer: from its module path, else its place among the graph's sites.

        A single site without a number (each layer compiled on its own) counts as no first layer.
        """
        if site.layer is not None:
            return site.layer
        return number if len(sites) > 1 else self.config.dense_layers

    def _report(self, sites: list[Site]) -> None:
        graph = self._counters.snapshot()["graphs"]
        for site in sites:
            length = str(query_length(site) or "?")
            outcome = f"left alone: {site.reason}" if site.reason else "rewritten"
            self._reports.append(
                SiteReport(graph, site.path, site.layer, length, site.idiom, outcome)
            )
            log.info("graph %d, %s: %s", graph, site.path, outcome)
            if site.reason and length == "1":
                self._warn_once(
                    f"decode attention of {site.path or 'the model'} stays dense: {site.reason}. "
                    "backend.explain() lists every attention call"
                )
        num_left = sum(bool(site.reason) for site in sites)
        self._counters.add(sites_rewritten=len(sites) - num_left, sites_skipped=num_left)

    def _new_sequence(self, layer: int) -> Sequence:
        return Sequence(self.config, self._counters, layer=layer, on_dense=self._on_dense)

    def _on_dense(self, reason: str, kv_len: int) -> None:
        if kv_len > self.config.budget:
            self._warn_once(
                f"a decode step over {kv_len} tokens, more than the budget of "
                f"{self.config.budget}, attended densely: {reason}"
            )

    def _warn_once(self, message: str) -> None:
        key = message.rsplit(":", 1)[-1]
        with self._lock:
            if key in self._warned:
                return
            self._warned.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


class _RewrittenGraph:
    """A compiled graph whose caches live in stores: opens them, runs, returns the caches."""

    def __init__(
        self,
        compiled: Compiled,
        plans: list[SitePlan],
        kept: list[int],
        num_outputs: int,
        caches: CacheRegistry,
    ) -> None:
        self.compiled = compiled
        self.plans = plans
        self.kept = kept
        self.num_outputs = num_outputs
        self.caches = caches

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        opened: list[OpenCache] = []
        try:
            for plan in self.plans:
                opened.append(self._open(plan, args))
            with named_range(_range_name(opened)), running(opened):
                results = self.compiled(*args)
            outputs: list[Any] = [None] * self.num_outputs
            for place, result in zip(self.kept, results, strict=True):
                outputs[place] = result
            for plan, cache in zip(self.plans, opened, strict=True):
                self._close(plan, cache, args, outputs)
        finally:
            for cache in opened:
                self.caches.abandon(cache)
        return tuple(outputs)

    def _open(self, plan: SitePlan, args: tuple[Any, ...]) -> OpenCache:
        if plan.past is None:
            return self.caches.open_empty(plan.layer)
        keys, values = (args[place] for place in plan.past)
        if plan.idiom == "in_place":
            return self.caches.open_buffer(plan.layer, keys)
        if keys.dim() != 4 or keys.numel() == 0:
            return self.caches.open_empty(plan.layer)
        return self.caches.open_store(plan.layer, keys, values, plan.dims)

    def _close(
        self, plan: SitePlan, cache: OpenCache, args: tuple[Any, ...], outputs: list[Any]
    ) -> None:
        if plan.idiom == "in_place":
            place = plan.outputs[0][0] if plan.outputs[0] else None
            keys: Tensor | None = args[plan.past[0]] if plan.past else None
            keys = outputs[place] if keys is None and place is not None else keys
            if keys is not None:
                self.caches.close_buffer(cache, keys)
            return
        order = [plan.dims.index(dim) for dim in range(4)]
        for view, places in zip(
            self.caches.close_store(plan.layer, cache), plan.outputs, strict=True
        ):
            shown = view.permute(order)
            for place in places:
                outputs[place] = shown


def _range_name(opened: list[OpenCache]) -> str:
    is_prompt = all(cache.sequence.kv_len == 0 for cache in opened)
    return "clusterkv.prefill" if is_prompt else "clusterkv.decode"


def clusterkv_backend(
    budget: int = 1024,
    *,
    config: ClusterKVConfig | None = None,
    inner: Inner = "inductor",
    **fields: Any,
) -> ClusterKVBackend:
    """Make a `torch.compile` backend that decodes with ClusterKV attention.

    Finds the attention calls that read a growing KV cache and replaces them; everything else goes
    to the inner backend. A prompt is attended to exactly, and clustered on the side; a decode step
    attends to `budget` selected tokens and the recent ones. With a budget that covers the context
    the model generates what it generates without the backend.

    Args:
        budget: tokens that a decode step attends to, sinks included.
        config: every setting at once, instead of `budget` and `fields`.
        inner: what compiles the rest of the graph: "inductor", "aot_eager" or "eager".
        **fields: fields of `ClusterKVConfig`.

    Returns:
        ClusterKVBackend: pass it as `backend`; `stats()` and `explain()` tell what it did.

    Raises:
        ValueError: a setting is out of its range, or `config` comes with other settings.
        TypeError: a setting is unknown or of the wrong type.

    Note:
        For transformers use ``model.compile(backend=...)``: `generate` of the result of
        ``torch.compile(model)`` runs the original, uncompiled module. Inference only: call the
        model under ``torch.no_grad()`` (`generate` does).

    Source:
        ClusterKV (arXiv:2412.03213). Deviation: nothing is clustered while the context fits the
        budget, and a decode step that would select everything attends densely.

    Example:
        >>> backend = clusterkv_backend(budget=1024)
        >>> backend.stats().sparse_steps
        0
        >>> print(backend.explain())
        no graph was compiled with this backend
    """
    if config is None:
        config = ClusterKVConfig(budget=budget, **fields)
    elif not isinstance(config, ClusterKVConfig):
        raise TypeError(f"config: expected a ClusterKVConfig, got {type(config).__name__}")
    elif fields or budget != 1024:
        raise ValueError("config: expected no other setting beside it, got some")
    if inner not in get_args(Inner):
        raise ValueError(f"inner: expected one of {', '.join(get_args(Inner))}, got {inner!r}")
    return ClusterKVBackend(config, inner)


_by_options: dict[str, ClusterKVBackend] = {}


def clusterkv(
    gm: fx.GraphModule,
    example_inputs: AnySequence[Any],
    *,
    options: dict[str, Any] | None = None,
    **_: Any,
) -> Compiled:
    """``torch.compile(model, backend="clusterkv", options={"budget": 1024})``: by name.

    Equal options share one backend, found again by `named_backend`.
    """
    return named_backend(**(options or {}))(gm, example_inputs)


def named_backend(**options: Any) -> ClusterKVBackend:
    """The backend behind ``backend="clusterkv"`` with these options."""
    key = repr(sorted(options.items()))
    if key not in _by_options:
        _by_options[key] = clusterkv_backend(**options)
    return _by_options[key]


def _warn_if_unused(counters: Counters) -> None:
    if not counters.snapshot().get("graphs"):
        warnings.warn(
            "a clusterkv backend was made and never called, so nothing ran sparsely. With "
            "transformers use model.compile(backend=...): generate() of torch.compile(model) "
            "runs the original module",
            RuntimeWarning,
            stacklevel=1,
        )


def _warn_at_recompile_limit() -> None:
    """Say it when Dynamo compiles a function for the last time."""
    current = torch._guards.CompileContext.current_compile_id()
    limit = torch._dynamo.config.recompile_limit
    if current is not None and current.frame_compile_id == limit - 1:
        warnings.warn(
            f"Dynamo has compiled this function {limit} times, its limit: the next new shape or "
            "mode runs uncompiled, and dense. Raise torch._dynamo.config.recompile_limit, or use "
            "one model a mode",
            RuntimeWarning,
            stacklevel=2,
        )
