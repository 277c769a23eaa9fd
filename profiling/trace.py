"""What a profiler trace says, reduced to what the analyses ask for.

Two schemas are understood: Kineto's of today (`kernel`, `cuda_runtime`, nanoseconds as decimals of
microseconds) and that of 2021 (`Kernel`, `Runtime`, whole microseconds). All times become integer
nanoseconds. Events that no analysis needs (flows, Python frames, memory) are dropped while
reading.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from clusterkv_ops.profiling.garbage import no_garbage_collection
from clusterkv_ops.profiling.reader import Progress, TraceError, TraceReader

Thread = tuple[str, str]

# Category -> what becomes of the event; the capital ones are of 2021.
_CATEGORIES = {
    "cpu_op": "range",
    "user_annotation": "range",
    "Operator": "range",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "Runtime": "launch",
    "kernel": "kernel",
    "Kernel": "kernel",
    "gpu_memcpy": "copy",
    "Memcpy": "copy",
    "gpu_memset": "memset",
    "Memset": "memset",
    "cuda_sync": "wait",
    "Trace": "session",
}
_DIGITS = re.compile(r"\d+")


class DeviceEvent(NamedTuple):
    """A kernel, copy or memset; `phase` is empty but for an annotated graph node."""

    start: int
    end: int
    name: str
    kind: str
    device: int
    stream: int
    correlation: int
    bytes: int
    phase: str


class Launch(NamedTuple):
    """A runtime call, which may have put work on the device."""

    start: int
    end: int
    name: str
    thread: Thread


class Range(NamedTuple):
    """A CPU operator or annotation."""

    start: int
    end: int
    name: str
    bytes: int


class StreamWait(NamedTuple):
    """From `time` on, `stream` of `device` had to wait for `waits_on`."""

    time: int
    device: int
    stream: int
    waits_on: int


class Trace:
    """A parsed trace. Events are in file order; `count` includes the dropped ones.

    Args:
        path: a trace file, plain or gzip.
        progress: called with the share of the file read so far.

    Raises:
        TraceError: the file cannot be read, or an event lacks a field; the message names file,
            event number and field.
    """

    def __init__(self, path: str | Path, progress: Progress | None = None) -> None:
        self.path = Path(path)
        self.device_events: list[DeviceEvent] = []
        self.launches: dict[int, Launch] = {}
        self.ranges: dict[Thread, list[Range]] = defaultdict(list)
        self.stream_waits: list[StreamWait] = []
        self.thread_names: dict[Thread, str] = {}
        self.session_starts: list[int] = []
        self.negative_durations = 0
        self.count = 0
        self._threads: dict[tuple[Any, Any], Thread] = {}
        reader = TraceReader(path, progress)
        with no_garbage_collection():
            self._read(reader)
        self.metadata = reader.metadata

    def _read(self, reader: TraceReader) -> None:
        adders: dict[Any, Callable[[dict[str, Any]], None]] = {
            category: getattr(self, f"_add_{kind}") for category, kind in _CATEGORIES.items()
        }
        number = -1
        for number, event in reader:
            phase = event.get("ph")
            try:
                if phase == "X":
                    add = adders.get(event.get("cat"))
                    if add is not None:
                        add(event)
                elif phase == "M":
                    self._add_name(event)
                elif phase is None:
                    raise _FieldError("ph: expected a letter, got nothing")
            except _FieldError as error:
                raise TraceError(f"{self.path}: event {number}: {error}") from None
        self.count = number + 1

    def _add_range(self, event: dict[str, Any]) -> None:
        start, end = self._times(event)
        size = _arguments(event).get("bytes", 0)
        # Any operator may have an argument of this name; ours is a whole number.
        item = Range(start, end, _name(event), size if type(size) is int else 0)
        self.ranges[self._thread(event)].append(item)

    def _add_launch(self, event: dict[str, Any]) -> None:
        arguments = _arguments(event)
        if "correlation" in arguments:
            start, end = self._times(event)
            launch = Launch(start, end, _name(event), self._thread(event))
            self.launches[_integer(arguments, "correlation", -1)] = launch

    def _add_kernel(self, event: dict[str, Any], kind: str = "kernel") -> None:
        start, end = self._times(event)
        arguments = _arguments(event)
        stream = _integer(arguments, "stream", None) if "stream" in arguments else _stream(event)
        device = _integer(arguments, "device", 0)
        correlation = _integer(arguments, "correlation", -1)
        size = _integer(arguments, "bytes", 0)
        phase = arguments.get("phase", "")
        name = _name(event)
        self.device_events.append(
            DeviceEvent(start, end, name, kind, device, stream, correlation, size, str(phase))
        )

    def _add_copy(self, event: dict[str, Any]) -> None:
        self._add_kernel(event, "copy")

    def _add_memset(self, event: dict[str, Any]) -> None:
        self._add_kernel(event, "memset")

    def _add_wait(self, event: dict[str, Any]) -> None:
        arguments = _arguments(event)
        waits_on = _integer(arguments, "wait_on_stream", -1)
        if arguments.get("cuda_sync_kind") == "Stream Wait Event" and waits_on >= 0:
            device, stream = _integer(arguments, "device", 0), _integer(arguments, "stream", -1)
            time = _nanoseconds(event, "ts")
            self.stream_waits.append(StreamWait(time, device, stream, waits_on))

    def _add_session(self, event: dict[str, Any]) -> None:
        self.session_starts.append(_nanoseconds(event, "ts"))

    def _add_name(self, event: dict[str, Any]) -> None:
        if event.get("name") == "thread_name":
            self.thread_names[self._thread(event)] = str(_arguments(event).get("name", "")).strip()

    def _times(self, event: dict[str, Any]) -> tuple[int, int]:
        start = _nanoseconds(event, "ts")
        duration = _nanoseconds(event, "dur")
        if duration < 0:
            self.negative_durations += 1
            duration = 0
        return start, start + duration

    def _thread(self, event: dict[str, Any]) -> Thread:
        key = event.get("pid"), event.get("tid")
        try:
            thread = self._threads.get(key)
        except TypeError:
            thread = None
        if thread is None:
            thread = self._threads[key] = _checked_thread(event)
        return thread


class _FieldError(ValueError):
    pass


def _nanoseconds(event: dict[str, Any], field: str) -> int:
    value = event.get(field)
    if type(value) is Decimal:
        return int(value * 1000)
    if type(value) is int:
        return value * 1000
    raise _FieldError(f"{field}: expected a number of microseconds, got {_shown(value)}")


def _integer(arguments: dict[str, Any], field: str, default: int | None) -> int:
    value = arguments.get(field, default)
    if type(value) is int:
        return value
    if isinstance(value, Decimal):
        return int(value)
    raise _FieldError(f"args.{field}: expected a number, got {_shown(value)}")


def _name(event: dict[str, Any]) -> str:
    name = event.get("name")
    if type(name) is not str:
        raise _FieldError(f"name: expected a string, got {_shown(name)}")
    return intern(name)


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    arguments = event.get("args")
    if type(arguments) is dict:
        return arguments
    if arguments is None:
        return {}
    raise _FieldError(f"args: expected an object, got {_shown(arguments)}")


def _checked_thread(event: dict[str, Any]) -> Thread:
    for field in ("pid", "tid"):
        if not isinstance(event.get(field), (int, str)):
            raise _FieldError(f"{field}: expected a number, got {_shown(event.get(field))}")
    return str(event["pid"]), str(event["tid"])


def _stream(event: dict[str, Any]) -> int:
    """The stream of a 2021 event, whose thread is called "stream 7"."""
    found = _DIGITS.search(str(event.get("tid")))
    return int(found[0]) if found else 0


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{value!s:.60}" if isinstance(value, Decimal) else f"{value!r:.60}"
