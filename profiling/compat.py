"""A copy of a trace that torch-tb-profiler 0.4.3 reads rightly.

That plugin ended before Kineto's categories changed. It gives no operator any device time, because
it doesn't know `cuda_runtime` and `cuda_driver`, and counts the device's copies of
`ProfilerStep#N` as more steps. The copy renames the former and leaves out the latter; the original
stays untouched.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

from clusterkv_ops.profiling.reader import Progress, TraceReader


def write_compat(source: str | Path, target: str | Path, progress: Progress | None = None) -> None:
    """Streams `source` into `target`, which is gzip. Raises `TraceError`.

    The events come last: the plugin takes the file's last bracket for the end of their list.
    """
    reader = TraceReader(source, progress)
    with tempfile.TemporaryFile("w+") as events:
        separator = ""
        for _, event in reader:
            kept = compatible(event)
            if kept is not None:
                events.write(f"{separator}\n{json.dumps(kept, default=_as_float)}")
                separator = ","
        events.seek(0)
        with gzip.open(target, "wt", compresslevel=5) as stream:
            stream.write("{")
            for key, value in reader.metadata.items():
                stream.write(f"{json.dumps(key)}: {json.dumps(value)},\n")
            stream.write('"traceEvents": [')
            shutil.copyfileobj(events, stream)
            stream.write("\n]}")


def compatible(event: dict[str, Any]) -> dict[str, Any] | None:
    """The event as the plugin expects it; None where it would mislead it."""
    category = event.get("cat")
    if category in ("cuda_runtime", "cuda_driver"):
        return {**event, "cat": "Runtime"}
    name = str(event.get("name", ""))
    if category == "gpu_user_annotation" and name.startswith("ProfilerStep#"):
        return None
    return event


def compat_name(source: str | Path) -> str:
    """A file name that the plugin looks for: `NAME.pt.trace.json.gz`."""
    name = Path(source).name
    for suffix in (".gz", ".json", ".kineto", ".trace", ".pt"):
        name = name.removesuffix(suffix)
    return f"{name}.pt.trace.json.gz"


def _as_float(value: object) -> float:
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"expected a number, got {value!r}")
