"""The document around the events, and the older or damaged forms of it."""

from __future__ import annotations

from typing import Any

from clusterkv_ops.profiling.synth.device import PROCESS

_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_CATEGORIES_2021 = {
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
    "cuda_runtime": "Runtime",
    "cpu_op": "Operator",
    "user_annotation": "Operator",
}


def document(events: list[dict[str, Any]], counters: dict[str, Any]) -> dict[str, Any]:
    """A whole trace: names of processes and threads, metadata, our counters."""
    streams = {event["tid"] for event in events if event.get("cat") == "kernel"}
    streams |= {event["tid"] for event in events if event.get("cat") == "gpu_memcpy"}
    named = [_process(PROCESS, "python", "CPU"), *_process_of_device(bool(streams))]
    named += [_thread(0, stream, f"stream {stream} ") for stream in sorted(streams)]
    threads = {event["tid"] for event in events if event.get("pid") == PROCESS}
    named += [_thread(PROCESS, tid, f"thread {tid} (python)") for tid in sorted(threads)]
    return {
        "schemaVersion": 1,
        "deviceProperties": [_PROPERTIES] if streams else [],
        "record_shapes": 1,
        "with_stack": 0,
        "profile_memory": 0,
        "clusterkv": {"schema": "clusterkv.counters/1", **counters},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1790857026000000000,
        "traceEvents": named + sorted(events, key=lambda event: event["ts"]),
        "traceName": "synthetic",
    }


def without_device_events(
    trace: dict[str, Any], windows: list[tuple[float, float]]
) -> dict[str, Any]:
    """What a profiler that lost the device's events of some microseconds would have written."""

    def is_lost(event: dict[str, Any]) -> bool:
        on_device = event.get("cat") in _DEVICE_CATEGORIES
        return on_device and any(start <= event["ts"] < end for start, end in windows)

    events = [event for event in trace["traceEvents"] if not is_lost(event)]
    return {**trace, "traceEvents": events}


def to_schema_2021(trace: dict[str, Any]) -> dict[str, Any]:
    """As torch 1.8 wrote it: other categories, whole microseconds, streams as thread names."""
    events = []
    for event in trace["traceEvents"]:
        category = event.get("cat")
        if category in ("gpu_user_annotation", "cuda_sync"):
            continue
        event = dict(event)
        if event["ph"] == "X":
            arguments = dict(event["args"])
            if category in _DEVICE_CATEGORIES:
                event["tid"] = f"stream {event['tid']}"
                arguments["external id"] = arguments.pop("External id", 0)
            event |= {"cat": _CATEGORIES_2021[category], "args": arguments}
            start, duration = (round(1000 * event[field]) for field in ("ts", "dur"))
            event["ts"] = start // 1000
            event["dur"] = (start + duration) // 1000 - event["ts"]
        events.append(event)
    kept = ("schemaVersion", "clusterkv", "traceName")
    return {**{key: trace[key] for key in kept}, "traceEvents": events}


_PROPERTIES = {
    "id": 0,
    "name": "Synthetic GPU",
    "totalGlobalMem": 85_899_345_920,
    "computeMajor": 9,
    "computeMinor": 0,
    "numSms": 132,
    "warpSize": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiprocessor": 2048,
    "regsPerBlock": 65536,
    "sharedMemPerBlock": 49152,
}


def _process_of_device(is_there: bool) -> list[dict[str, Any]]:
    return [_process(0, "python", "GPU 0")] if is_there else []


def _process(process: int, name: str, label: str) -> dict[str, Any]:
    arguments = {"name": name, "labels": label}
    return {
        "ph": "M",
        "name": "process_name",
        "ts": 0.0,
        "pid": process,
        "tid": 0,
        "args": arguments,
    }


def _thread(process: int, thread: int, name: str) -> dict[str, Any]:
    arguments = {"name": name}
    return {
        "ph": "M",
        "name": "thread_name",
        "ts": 0.0,
        "pid": process,
        "tid": thread,
        "args": arguments,
    }
