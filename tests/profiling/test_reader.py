"""Reading: both compressions, both document forms, and what is said of a broken file."""

import gzip
import json
import subprocess
import sys

import pytest

from clusterkv_ops.profiling.reader import TraceError, TraceReader
from clusterkv_ops.profiling.trace import Trace

KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "k",
    "pid": 0,
    "tid": 7,
    "ts": 10.001,
    "dur": 2.5,
    "args": {"device": 0, "stream": 7, "correlation": 1},
}


def text_of(*events, **metadata):
    return json.dumps({**metadata, "traceEvents": list(events), "after": [1, {"b": 2.5}]})


def write(folder, content, name="t.json"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_gzip_is_recognised_by_content_and_times_are_exact(tmp_path):
    path = write(tmp_path, gzip.compress(text_of(KERNEL).encode()), "no-suffix")
    event = Trace(path).device_events[0]
    assert (event.start, event.end, event.stream) == (10_001, 12_501, 7)


def test_absolute_microseconds_keep_their_nanoseconds(tmp_path):
    content = text_of(KERNEL).replace("10.001", "1709234567890123.457")
    event = Trace(write(tmp_path, content)).device_events[0]
    assert event.start == 1709234567890123457


def test_metadata_before_and_behind_the_events_is_kept(tmp_path):
    reader = TraceReader(write(tmp_path, text_of(KERNEL, clusterkv={"budget": 8})))
    assert [number for number, _ in reader] == [0]
    assert reader.metadata["clusterkv"] == {"budget": 8}
    assert reader.metadata["after"][0] == 1


def test_a_bare_list_of_events_is_a_trace(tmp_path):
    assert Trace(write(tmp_path, json.dumps([KERNEL, KERNEL]))).count == 2


def test_an_event_longer_than_a_chunk_is_read_whole(tmp_path):
    long = {**KERNEL, "args": {**KERNEL["args"], "note": "x" * 6_000_000}}
    assert Trace(write(tmp_path, text_of(KERNEL, long, KERNEL))).count == 3


def test_progress_ends_at_one(tmp_path):
    shares = []
    Trace(write(tmp_path, text_of(KERNEL)), shares.append)
    assert shares[-1] == 1.0


def test_a_negative_duration_is_counted_and_taken_as_zero(tmp_path):
    trace = Trace(write(tmp_path, text_of({**KERNEL, "dur": -1})))
    assert trace.negative_durations == 1
    assert trace.device_events[0].start == trace.device_events[0].end


whole = text_of(KERNEL, KERNEL)
BROKEN = {
    "empty": ("", "metadata: the file ends too early (truncated)"),
    "not JSON": ("hello", "metadata: expected an object or a list of events, got 'hello'"),
    "cut in an event": (whole[:170], "event 1: the file ends too early (truncated)"),
    "cut behind an event": (whole[: whole.index("}}") + 2], "event 0: the file ends too early"),
    "cut in a string": (whole[: whole.index("kernel") + 3], "event 0: the file ends too early"),
    "no comma": (
        whole.replace("}}, {", "}} {"),
        "event 0: expected a comma or the end of the list",
    ),
    "bare word": (whole.replace("2.5", "two"), "event 0: Expecting value at character "),
    "events are an object": ('{"traceEvents": {}}', "metadata: expected traceEvents to be a list"),
    "event is a number": ('{"traceEvents": [3]}', "event 0: expected an object, got 3"),
    "no colon": ('{"traceEvents" []}', "metadata: expected a colon after 'traceEvents'"),
    "number as key": ("{3: 4}", "metadata: expected a key, got 3"),
    "deep": ('{"a": ' + "[" * 200_000, "metadata: nested too deeply"),
    "cut gzip": (gzip.compress(whole.encode())[:60], "damaged gzip data"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_the_place(tmp_path, name):
    content, message = BROKEN[name]
    path = write(tmp_path, content)
    with pytest.raises(TraceError) as caught:
        Trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


FIELDS = {
    "ts is missing": ({"ts": None}, "ts: expected a number of microseconds, got nothing"),
    "ts is text": ({"ts": "1"}, "ts: expected a number of microseconds, got '1'"),
    "dur is a list": ({"dur": [1]}, "dur: expected a number of microseconds, got [1]"),
    "dur is not a number": (
        {"dur": float("nan")},
        "dur: expected a number of microseconds, got nan",
    ),
    "name is a number": ({"name": 5}, "name: expected a string, got 5"),
    "ph is missing": ({"ph": None}, "ph: expected a letter, got nothing"),
    "args is a list": ({"args": [1]}, "args: expected an object, got [1]"),
    "stream is text": ({"args": {"stream": "a"}}, "args.stream: expected a number, got 'a'"),
    "bytes is text": ({"args": {"bytes": "many"}}, "args.bytes: expected a number, got 'many'"),
    "correlation is null": (
        {"args": {"correlation": None}},
        "args.correlation: expected a number",
    ),
    "pid of an operator": ({"cat": "cpu_op", "pid": None}, "pid: expected a number, got nothing"),
    "wait on a word": (
        {
            "cat": "cuda_sync",
            "args": {"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": "x"},
        },
        "args.wait_on_stream: expected a number, got 'x'",
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_malformed_event_is_named_with_its_number_and_field(tmp_path, name):
    change, message = FIELDS[name]
    path = write(tmp_path, text_of(KERNEL, {**KERNEL, **change}))
    with pytest.raises(TraceError) as caught:
        Trace(path)
    assert str(caught.value).startswith(f"{path}: event 1: {message}")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"absent\.json: cannot be read"):
        Trace(tmp_path / "absent.json")


def test_memory_does_not_grow_with_events_that_no_analysis_needs(tmp_path):
    """Peak memory while 40 MB of text go by, in a process of its own."""
    frame = {"ph": "X", "cat": "python_function", "name": "f" * 180, "ts": 1.5, "dur": 2.0}
    content = text_of(*[KERNEL, *[frame] * 150_000])
    path = write(tmp_path, content)
    assert path.stat().st_size > 35_000_000
    code = (
        "import resource, sys; from clusterkv_ops.profiling.trace import Trace;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "before = peak(); count = Trace(sys.argv[1]).count; print(count, peak() - before)"
    )
    out = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True)
    count, grown_kib = map(int, out.stdout.split())
    assert count == 150_001
    assert grown_kib < 64 * 1024
