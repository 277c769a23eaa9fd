"""The same run without a device: the model on the main thread, clustering on a worker.

main     |qkv|rope|attention  |ffn  |qkv|rope|attention  |ffn  |wait |
worker            |clustering   |            |clustering             |
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from clusterkv_ops.profiling.synth.device import PROCESS
from clusterkv_ops.profiling.synth.document import document
from clusterkv_ops.profiling.synth.truth import ModeTruth, Truth

_WORKER = PROCESS + 1


def synthesize_threads(
    layers: int, steps: int, rng: random.Random
) -> tuple[dict[str, Any], Truth]:
    """A CPU-only trace of one prefill, which ends waiting for clustering, and decode steps."""
    run = _ThreadRun(rng)
    truth: Truth = {"prefill": ModeTruth(calls=1), "decode": ModeTruth(calls=steps)}
    with run.range("clusterkv.prefill"):
        for layer in range(layers):
            with run.range(f"clusterkv.layer.{layer}"):
                run.prefill_layer(truth["prefill"], layer, is_last=layer == layers - 1)
    for _ in range(steps):
        run.now += 3_000
        with run.range("clusterkv.decode"):
            for layer in range(layers):
                with run.range(f"clusterkv.layer.{layer}"):
                    run.decode_layer(truth["decode"])
    counters = {"model": "synthetic, cpu", "context": 8192, "budget": 1024}
    counters |= {"recall_hits": 300, "recall_misses": 100, "sparse_steps": steps, "dense_steps": 0}
    return document(run.events, counters), truth


class _ThreadRun:
    """The main thread's clock; `events` grows."""

    def __init__(self, rng: random.Random) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 1_000_000
        self.random = rng

    def prefill_layer(self, mode: ModeTruth, layer: int, *, is_last: bool) -> None:
        """Clustering is longer than the rest of its layer only in the last one."""
        qkv, rope, attention, ffn, clustering = map(self._time, (300, 40, 800, 600, 500))
        self.operator("aten::addmm", qkv)
        mode.add_model("linear", qkv)
        self.now += rope
        mode.add_model("other", rope)
        wait = self._time(90) if is_last else 0
        if is_last:
            clustering = attention + ffn + wait
        self._cluster(layer, clustering)
        mode.phase("clustering").add(clustering, hidden=clustering - wait, exposed=wait)
        self.operator("aten::scaled_dot_product_attention", attention, "aten::bmm")
        mode.add_model("attention", attention)
        self.operator("aten::linear", ffn, "aten::addmm")
        mode.add_model("linear", ffn)
        if is_last:
            self.operator("clusterkv.wait.clustering", wait)
            mode.wall += wait

    def decode_layer(self, mode: ModeTruth) -> None:
        """All on the main thread; selection is a range around its operator."""
        qkv, selection, recall, attention, ffn = map(self._time, (30, 12, 9, 25, 70))
        self.operator("aten::addmm", qkv)
        mode.add_model("linear", qkv)
        self.operator("clusterkv.selection", selection, "clusterkv::select_clusters")
        mode.add_exposed("selection", selection)
        self.operator("clusterkv.recall", recall, "clusterkv::recall", moved=4096)
        mode.add_exposed("recall", recall, moved=4096)
        self.operator("clusterkv.attention", attention, "clusterkv::selected_attention")
        mode.add_model("attention", attention)
        self.operator("aten::linear", ffn, "aten::addmm")
        mode.add_model("linear", ffn)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        start = self.now
        yield
        self._write("user_annotation", name, PROCESS, start, self.now - start)

    def operator(self, name: str, time: int, inner: str | None = None, moved: int = 0) -> None:
        """A range of the main thread, and maybe one inside it that leaves 1 us at both ends."""
        category = "cpu_op" if "::" in name else "user_annotation"
        self._write(category, name, PROCESS, self.now, time, {"bytes": moved} if moved else {})
        if inner:
            self._write("cpu_op", inner, PROCESS, self.now + 1_000, time - 2_000)
        self.now += time

    def _cluster(self, layer: int, time: int) -> None:
        """The worker's ranges, from now on."""
        self._write("user_annotation", f"clusterkv.layer.{layer}", _WORKER, self.now, time)
        self._write("user_annotation", "clusterkv.clustering", _WORKER, self.now, time)
        self._write("cpu_op", "clusterkv::cluster_keys", _WORKER, self.now, time)

    def _time(self, microseconds: float) -> int:
        return round(microseconds * 1000 * self.random.uniform(0.95, 1.05))

    def _write(
        self,
        category: str,
        name: str,
        thread: int,
        start: int,
        time: int,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": PROCESS, "tid": thread}
        event |= {"ts": start / 1000, "dur": time / 1000, "args": arguments or {}}
        self.events.append(event)
