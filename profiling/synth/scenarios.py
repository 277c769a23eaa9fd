"""Runs of a small model, planned so that every number of the report is known.

Prefill, per layer (the side streams start when the keys exist):

    stream 7   |qkv |rope|attention         |ffn           |
    stream 20            |clustering   |
    stream 24            |offload            |

A decode step, per layer (attention waits for the recalled tokens):

    stream 7   |qkv |select|        |attention |ffn      |
    stream 24              |recall  |
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from clusterkv_ops.profiling.synth.device import DeviceRun, Work
from clusterkv_ops.profiling.synth.document import document, to_schema_2021, without_device_events
from clusterkv_ops.profiling.synth.threads import synthesize_threads
from clusterkv_ops.profiling.synth.truth import ModeTruth, Truth

KINDS = {
    "overlapped": "clustering and offload beside the model",
    "serial": "clustering on the main stream, before attention",
    "graph": "decode steps replayed from a CUDA graph",
    "graph-unnamed": "the same, with kernels whose names tell nothing",
    "pageable": "copies from and to memory that is not pinned",
    "streams": "keys and values recalled on two streams at once",
    "pdl": "kernels that start before their predecessor on the stream ends",
    "dropped": "a first decode step whose device events are missing",
    "schema-2021": "the profiler's first schema: whole microseconds, other categories",
    "cpu": "no device: lanes are threads, clustering on a worker",
}

MAIN, SIDE, COPY, COPY_VALUES = 7, 20, 24, 25
_GRAPH_STREAMS = {MAIN: 13, SIDE: 14, COPY: 15, COPY_VALUES: 16}
_TOKEN_BYTES = 2 * 128 * 2


def synthesize(
    kind: str = "overlapped", *, layers: int = 4, steps: int = 4, seed: int = 0
) -> tuple[dict[str, Any], Truth]:
    """A trace of one prefill and `steps` decode steps, and its truth.

    Args:
        kind: one of `KINDS`.
        layers, steps: at least 1.
        seed: of the jitter of all durations.

    Raises:
        ValueError: unknown kind, or too few layers or steps.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    for name, value in (("layers", layers), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if kind == "cpu":
        return synthesize_threads(layers, steps, random.Random(seed))
    return _Scenario(kind, layers, random.Random(seed)).run(steps)


@dataclass
class _Scenario:
    kind: str
    layers: int
    random: random.Random

    def run(self, steps: int) -> tuple[dict[str, Any], Truth]:
        self.device = DeviceRun()
        self.truth: Truth = {"prefill": ModeTruth(), "decode": ModeTruth()}
        self.counters: list[dict[str, int]] = []
        with self.device.range("ProfilerStep#0"):
            self._prefill()
        dropped: list[tuple[float, float]] = []
        for step in range(steps):
            begin = self.device.host
            with self.device.range(f"ProfilerStep#{step + 1}"):
                self._decode(is_lost=self.kind == "dropped" and step == 0)
            if self.kind == "dropped" and step == 0:
                dropped.append((begin / 1000, self.device.host / 1000))
        trace = document(self.device.events, self._counters())
        if dropped:
            trace = without_device_events(trace, dropped)
        return to_schema_2021(trace) if self.kind == "schema-2021" else trace, self.truth

    def _prefill(self) -> None:
        mode = self.truth["prefill"]
        with self.device.range("clusterkv.prefill"):
            for layer in range(self.layers):
                with self.device.range(f"clusterkv.layer.{layer}"):
                    self._prefill_layer(mode)
        self.device.finish_call()
        mode.calls += 1

    def _prefill_layer(self, mode: ModeTruth) -> None:
        qkv, rope, attention, ffn = (self._time(us) for us in (420, 60, 900, 780))
        rounds = [(self._time(70), self._time(30)) for _ in range(4)]
        clustering = sum(map(sum, rounds))
        offload = self._time(640)
        moved = 8192 * 8 * _TOKEN_BYTES
        is_serial = self.kind == "serial"
        device = self.device
        device.launch("aten::mm", MAIN, [Work("nvjet_tst_128x256_qkv", qkv)])
        keys = device.launch("aten::mul", MAIN, [Work("triton_poi_fused_rope_0", rope)])
        with device.range("clusterkv.clustering"):
            works = [
                work
                for assign, update in rounds
                for work in (
                    Work("clusterkv_assign_clusters<bf16>", assign),
                    Work("clusterkv_update_centroids<bf16>", update),
                )
            ]
            stream = MAIN if is_serial else SIDE
            device.launch("clusterkv::cluster_keys", stream, works, after=keys)
        with device.range("clusterkv.offload"):
            copy = Work(self._copy("DtoH"), offload, moved)
            device.launch("aten::copy_", COPY, [copy], after=keys)
        name = "flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>"
        device.launch("aten::_scaled_dot_product_flash_attention", MAIN, [Work(name, attention)])
        device.launch("aten::mm", MAIN, [Work("nvjet_tst_256x128_ffn", ffn)])
        mode.add_model("linear", qkv + ffn)
        mode.add_model("other", rope)
        mode.add_model("attention", attention)
        hidden = offload
        if is_serial:
            mode.add_exposed("clustering", clustering, count=len(works))
            hidden = offload - clustering
        else:
            mode.phase("clustering").add(clustering, hidden=clustering, count=len(works))
        # In the serial run, offload and clustering start together: what runs beside clustering is
        # outside the model, and the instant belongs to clustering.
        mode.phase("offload").add(offload, hidden=hidden, moved=moved)

    def _decode(self, is_lost: bool) -> None:
        mode = ModeTruth() if is_lost else self.truth["decode"]
        hits = misses = 0
        is_graph = self.kind.startswith("graph")
        replay = self.device.replay() if is_graph else nullcontext()
        with self.device.range("clusterkv.decode"), replay:
            for layer in range(self.layers):
                with self.device.range(f"clusterkv.layer.{layer}"):
                    fetched = self._decode_layer(mode)
                hits, misses = hits + 512 - fetched, misses + fetched
        self.device.finish_call()
        mode.calls += 1
        self.counters.append({"hits": hits, "misses": misses})

    def _decode_layer(self, mode: ModeTruth) -> int:
        qkv, score, expand, attention, ffn = (self._time(us) for us in (14, 8, 4, 18, 52))
        misses = self.random.choice((96, 192, 320))
        early = 2_000 if self.kind == "pdl" else 0
        device, stream = self.device, self._stream
        device.launch("aten::mm", stream(MAIN), [Work("gemv2T_qkv", qkv)])
        with device.range("clusterkv.selection"):
            works = [
                Work(self._own("clusterkv_select_clusters_score"), score),
                Work(self._own("clusterkv_select_clusters_expand"), expand),
            ]
            chosen = device.launch("clusterkv::select_clusters", stream(MAIN), works)
        recalled = self._recall(mode, chosen, misses)
        name = self._own("clusterkv_selected_attention<bf16, 128>")
        operator = "clusterkv::selected_attention"
        with device.range("clusterkv.attention"):
            device.launch(operator, stream(MAIN), [Work(name, attention)], after=recalled)
        device.launch("aten::mm", stream(MAIN), [Work("gemv2T_ffn", ffn)], early=early)
        mode.add_model("linear", qkv)
        mode.add_exposed("selection", score + expand, count=2)
        mode.add_model("attention", attention)
        mode.add_model("linear", ffn)
        mode.phase("linear").exposed -= early
        mode.wall -= early
        return misses

    def _recall(self, mode: ModeTruth, chosen: int, misses: int) -> int:
        """Copies the misses in; returns what attention waits for."""
        moved = misses * _TOKEN_BYTES
        time = self._time(misses / 8)
        device, copy = self.device, self._stream(COPY)
        with device.range("clusterkv.recall"):
            work = Work(self._copy("HtoD"), time, moved)
            token = device.launch("clusterkv::recall", copy, [work], after=chosen)
            if self.kind == "streams":
                values = Work(self._copy("HtoD"), time // 2, moved)
                device.launch("clusterkv::recall", COPY_VALUES, [values], after=chosen)
                mode.phase("recall").add(0, moved=moved)
            device.wait_stream(self._stream(MAIN), copy)
        mode.add_exposed("recall", time, moved=moved)
        return token

    def _time(self, microseconds: float) -> int:
        """A duration within 5 %, in nanoseconds."""
        time = round(microseconds * 1000 * self.random.uniform(0.95, 1.05))
        return round(time, -3) if self.kind == "schema-2021" else time

    def _copy(self, direction: str) -> str:
        host = "Pageable" if self.kind == "pageable" else "Pinned"
        ends = f"{host} -> Device" if direction == "HtoD" else f"Device -> {host}"
        return f"Memcpy {direction} ({ends})"

    def _own(self, name: str) -> str:
        return "kernel_7" if self.kind == "graph-unnamed" else name

    def _stream(self, stream: int) -> int:
        """A replayed graph runs on streams of the driver's choice."""
        return _GRAPH_STREAMS[stream] if self.kind.startswith("graph") else stream

    def _counters(self) -> dict[str, Any]:
        moved = [step["misses"] * _TOKEN_BYTES for step in self.counters]
        asked = [(step["hits"] + step["misses"]) * _TOKEN_BYTES for step in self.counters]
        return {
            "model": f"synthetic, {self.kind}",
            "context": 8192,
            "budget": 1024,
            "recall_hits": sum(step["hits"] for step in self.counters),
            "recall_misses": sum(step["misses"] for step in self.counters),
            "bytes_asked": sum(asked),
            "bytes_moved": sum(moved),
            "num_clusters": 102,
            "sparse_steps": len(self.counters),
            "dense_steps": 0,
            "steps": [
                {"step": i, **step, "bytes_asked": asked[i], "bytes_moved": moved[i]}
                for i, step in enumerate(self.counters)
            ],
        }
