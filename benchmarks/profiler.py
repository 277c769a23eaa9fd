"""What the profiler itself costs: reading a 200 MB trace, and ranges while no profiler runs.

    python benchmarks/profiler.py read     a 200 MB trace, limits 20 s of CPU (linked) and 1 GB
    python benchmarks/profiler.py ranges   decode with ranges against decode without, limit 1 %

Exits with 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch


def main() -> int:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("read", "ranges"))
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    if arguments.what == "read":
        return measure_reading(arguments.megabytes)
    return measure_ranges(arguments.rounds)


def measure_reading(megabytes: int) -> int:
    """Reads and accounts for a trace of that size."""
    from clusterkv_ops.profiling.report import build_report
    from clusterkv_ops.profiling.timeline import read_timeline

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.json"
        write_big_trace(path, megabytes * 1_000_000)
        before = peak_megabytes()
        wall, cpu = time.perf_counter(), time.process_time()
        timeline = read_timeline(path)
        read_s, read_cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        build_report(timeline)
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    peak = peak_megabytes()
    print(f"{megabytes} MB, {timeline.trace.count:,} events")
    print(f"read and linked in {read_cpu_s:.1f} s of CPU ({read_s:.1f} s of wall clock)")
    print(f"with the report {cpu_s:.1f} s ({wall_s:.1f} s)")
    print(f"peak {peak:.0f} MB, of it {before:.0f} MB before reading")
    return int(read_cpu_s > 20 or peak > 1000)


def write_big_trace(path: Path, size: int) -> None:
    """One synthetic run over and over, each time later and with launches of its own."""
    from clusterkv_ops.profiling.synth import synthesize

    trace, _ = synthesize("overlapped", layers=30, steps=8)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    length = max(event["ts"] + event["dur"] for event in events) + 100
    with open(path, "w") as stream:
        stream.write('{"schemaVersion": 1, "traceEvents": [\n')
        written = repetition = 0
        while written < size:
            shifted = (shift(event, repetition, length) for event in events)
            text = ("" if repetition == 0 else ",\n") + ",\n".join(map(json.dumps, shifted))
            stream.write(text)
            written += len(text)
            repetition += 1
        stream.write("\n]}")


def shift(event: dict[str, Any], repetition: int, length: float) -> dict[str, Any]:
    """The event of a later repetition."""
    arguments = dict(event["args"])
    if "correlation" in arguments:
        arguments["correlation"] += repetition * 1_000_000
    return {**event, "ts": round(event["ts"] + repetition * length, 3), "args": arguments}


def peak_megabytes() -> float:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure_ranges(rounds: int) -> int:
    """Decode steps with and without ranges in turn, on one model and one sequence length."""
    step = prepare_decode()
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * rounds):
        has_ranges = i % 2 == 0
        with nullcontext() if has_ranges else without_ranges():
            start = time.perf_counter()
            for _ in range(4):
                step()
            times[has_ranges].append(time.perf_counter() - start)
    pairs = zip(times[True], times[False], strict=True)
    cost = 100 * (median(on / off for on, off in pairs) - 1)
    print(f"{1e3 * median(times[True]) / 4:.2f} ms a step with ranges, {cost:+.2f} % over without")
    return int(cost > 1)


def prepare_decode() -> Any:
    """A function that decodes one token of a small random model behind 2,048 tokens."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from clusterkv_ops import clusterkv_backend

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=1024,
    )
    model = LlamaForCausalLM(config).eval()
    model.compile(backend=clusterkv_backend(budget=256, inner="eager"))
    cache = DynamicCache(config=config)
    token = torch.zeros(1, 1, dtype=torch.long)

    def step(ids: torch.Tensor = token) -> None:
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    step(torch.randint(0, 1024, (1, 2048)))
    for _ in range(8):
        step()
    return step


@contextmanager
def without_ranges() -> Iterator[None]:
    """As if no range were in the code."""
    nothing = nullcontext()
    modules = (
        "clusterkv_ops.graphs.runtime",
        "clusterkv_ops.graphs.backend",
        "clusterkv_ops.sequence",
    )
    with (
        patch(f"{modules[0]}.named_range", lambda name: nothing),
        patch(f"{modules[1]}.named_range", lambda name: nothing),
        patch(f"{modules[2]}.named_range", lambda name: nothing),
    ):
        yield


if __name__ == "__main__":
    sys.exit(main())
