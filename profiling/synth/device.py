"""Writes the events of a GPU run: a host that launches and streams that work, in Kineto's schema.

Work is queued by the host and scheduled when the call is complete, so that the device never waits
for a launch and its times are exactly the planned ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from clusterkv_ops.profiling.intervals import Interval

PROCESS = 4242
_LAUNCH_NS = 900
_STEP_NS = 100
_LATENCY_NS = 5_000


class Work(NamedTuple):
    """One kernel, copy or memset: name, nanoseconds, bytes."""

    name: str
    duration: int
    bytes: int = 0


class _Queued(NamedTuple):
    work: Work
    stream: int
    after: int | None
    early: int
    correlation: int
    is_graph: bool
    operator: int
    ranges: tuple[int, ...]


class DeviceRun:
    """The state of host and streams; `events` grows."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.host = 1_000_000
        self._correlation = 100
        self._external = 0
        self._open: list[int] = []
        self._queue: list[_Queued] = []
        self._range_names: dict[int, str] = {}
        self._graph_correlation: int | None = None
        self.streams: set[int] = set()

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """A `record_function` range of the host."""
        start, external = self.host, self._next_external()
        self._range_names[external] = name
        self._open.append(external)
        self.host += _STEP_NS
        yield
        self.host += _STEP_NS
        self._open.pop()
        self._complete("user_annotation", name, start, self.host, {"External id": external})

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Everything launched inside belongs to one CUDA graph: one launch, no operators."""
        self._correlation += 1
        self._graph_correlation = self._correlation
        self._runtime("cudaGraphLaunch", 311, self._correlation, None)
        yield
        self._graph_correlation = None

    def launch(
        self,
        operator: str,
        stream: int,
        works: list[Work],
        *,
        after: int | None = None,
        early: int = 0,
    ) -> int:
        """An operator that launches `works`; returns the token of the last one.

        Args:
            after: token of work that must end first.
            early: nanoseconds by which the first work starts before its predecessor on the stream
                ends (programmatic dependent launch).
        """
        start, external = self.host, self._next_external()
        self.host += _STEP_NS
        for work in works:
            correlation = self._graph_correlation or self._launch_one(work, external)
            ranges = tuple(self._open)
            is_graph = self._graph_correlation is not None
            self._queue.append(
                _Queued(work, stream, after, early, correlation, is_graph, external, ranges)
            )
            early = 0
        if self._graph_correlation is not None:
            self.host = start
        else:
            self.host += _STEP_NS
            arguments = {"External id": external, "Record function id": 0, "Ev Idx": external}
            self._complete("cpu_op", operator, start, self.host, arguments)
        return len(self._queue) - 1

    def wait_stream(self, stream: int, waits_on: int) -> None:
        """The host makes `stream` wait for an event of another stream."""
        if self._graph_correlation is not None:
            return
        recorded = self._correlation + 1
        self._correlation += 2
        self._runtime("cudaEventRecord", 135, recorded, None)
        self._runtime("cudaStreamWaitEvent", 147, self._correlation, None)
        arguments = {
            "cuda_sync_kind": "Stream Wait Event",
            "wait_on_stream": waits_on,
            "wait_on_cuda_event_record_corr_id": recorded,
            "stream": stream,
            "correlation": self._correlation,
            "device": 0,
            "context": 1,
        }
        self._write("cuda_sync", "Stream Wait Event", 0, stream, self.host, _STEP_NS, arguments)

    def finish_call(self) -> Interval:
        """Schedules the queued work, returns its first start and last end. The host waits."""
        begin = self.host + _LATENCY_NS
        clocks: dict[int, int] = {}
        ends: list[int] = []
        spans: dict[tuple[int, int], Interval] = {}
        for item in self._queue:
            start = clocks.get(item.stream, begin + item.early) - item.early
            if item.after is not None:
                start = max(start, ends[item.after])
            end = start + item.work.duration
            clocks[item.stream] = end
            ends.append(end)
            self._device_event(item, start, end)
            for external in {*item.ranges[:1], *item.ranges[-1:]}:
                low, high = spans.get((external, item.stream), (start, end))
                spans[external, item.stream] = (min(low, start), max(high, end))
        self._device_annotations(spans)
        self._queue.clear()
        self.host = max(ends) + _LATENCY_NS
        return begin, max(ends)

    def _launch_one(self, work: Work, external: int) -> int:
        self._correlation += 1
        is_copy = work.name.startswith("Memcpy")
        name = "cudaMemcpyAsync" if is_copy else "cudaLaunchKernel"
        self._runtime(name, 41 if is_copy else 211, self._correlation, external)
        return self._correlation

    def _runtime(self, name: str, callback: int, correlation: int, external: int | None) -> None:
        arguments = {"cbid": callback, "correlation": correlation}
        if external is not None:
            arguments["External id"] = external
        end = self.host + _LAUNCH_NS
        self._complete("cuda_runtime", name, self.host, end, arguments)
        self._flow("s", correlation, PROCESS, PROCESS, self.host)
        self.host = end

    def _device_event(self, item: _Queued, start: int, end: int) -> None:
        work, stream = item.work, item.stream
        arguments: dict[str, Any] = {"device": 0, "context": 1, "stream": stream}
        arguments["correlation"] = item.correlation
        if item.is_graph:
            arguments |= {"graph id": 3, "graph node id": (3 << 32) | (item.operator + 1)}
        else:
            arguments["External id"] = item.operator
        category = "kernel"
        if work.name.startswith("Memcpy"):
            category = "gpu_memcpy"
            speed = work.bytes / max(work.duration, 1)
            arguments |= {"bytes": work.bytes, "memory bandwidth (GB/s)": speed}
        else:
            arguments |= {"grid": [264, 1, 1], "block": [128, 1, 1], "registers per thread": 128}
            arguments |= {"blocks per SM": 2.0, "warps per SM": 8.0, "shared memory": 49152}
            arguments |= {"est. achieved occupancy %": 25, "queued": 0}
        self.streams.add(stream)
        self._write(category, work.name, 0, stream, start, end - start, arguments)
        self._flow("f", item.correlation, 0, stream, start)

    def _device_annotations(self, spans: dict[tuple[int, int], Interval]) -> None:
        """The device's copy of the innermost ranges, one nanosecond wider on both sides."""
        for (external, stream), (low, high) in spans.items():
            arguments = {"External id": external}
            name = self._range_names[external]
            duration = high - low + 2
            self._write("gpu_user_annotation", name, 0, stream, low - 1, duration, arguments)

    def _next_external(self) -> int:
        self._external += 1
        return self._external

    def _complete(
        self, category: str, name: str, start: int, end: int, arguments: dict[str, Any]
    ) -> None:
        self._write(category, name, PROCESS, PROCESS, start, end - start, arguments)

    def _write(
        self,
        category: str,
        name: str,
        process: int,
        thread: int,
        start: int,
        duration: int,
        arguments: dict[str, Any],
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": process,
                "tid": thread,
                "ts": start / 1000,
                "dur": duration / 1000,
                "args": arguments,
            }
        )

    def _flow(self, kind: str, number: int, process: int, thread: int, time: int) -> None:
        event = {"ph": kind, "id": number, "pid": process, "tid": thread, "ts": time / 1000}
        event |= {"cat": "ac2g", "name": "ac2g"}
        if kind == "f":
            event["bp"] = "e"
        self.events.append(event)
