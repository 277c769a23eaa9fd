"""Everything that needs a GPU, in one run: build, tests, sanitizer, measurements.

    python benchmarks/gpu.py [--output FOLDER] [--skip build tests sanitizer]

Meant for a bare machine without network, with torch (2.11 or later), nvcc and pytest. Each step
has a time limit; one that fails is recorded and the rest goes on. Writes gpu.json, and what
gpu_operators.py writes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
LIMITS_S = {"build": 150, "tests": 100, "sanitizer": 60, "sweep": 40, "measure": 120}
# The tests of the operators' results; those of Python's side need no GPU.
TESTS = ["tests/ops", "-m", "cuda", "-q", "-k", "not compile and not opcheck"]


def build() -> list[str]:
    """The extension in place, for the architecture at hand only."""
    return [sys.executable, "setup.py", "build_ext", "--inplace"]


def tests() -> list[str]:
    return [sys.executable, "-m", "pytest", *TESTS]


def sanitizer() -> list[str] | None:
    """Every operator once on small inputs under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return None
    small = [sys.executable, "benchmarks/gpu_operators.py", "--small"]
    return [tool, "--error-exitcode", "9", "--kernel-name", "kns=clusterkv_", *small]


def sweep() -> list[str]:
    """How many parts of the channels the centroid update is fastest with."""
    program = Path(tempfile.mkdtemp()) / "parts_sweep"
    compiler = "nvcc -O3 -std=c++17 -arch=native -I csrc/cuda benchmarks/parts_sweep.cu -o"
    return ["sh", "-c", f"{compiler} {program} && {program} 32768 && {program} 131072"]


def measure(output: Path) -> list[str]:
    return [sys.executable, "benchmarks/gpu_operators.py", "--output", str(output)]


def run(name: str, command: list[str] | None) -> dict[str, Any]:
    """Run one step and say how it went; its output goes through and its end is kept."""
    if command is None:
        return {"status": "not run: the tool is not installed"}
    environment = {**os.environ, "CLUSTERKV_REQUIRE_CUDA": "1", "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=LIMITS_S[name],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        status, text = "ok" if done.returncode == 0 else f"exit {done.returncode}", done.stdout
    except subprocess.TimeoutExpired as late:
        status, text = f"over {LIMITS_S[name]} s", str(late.stdout or "")
    print(f"== {name}: {status}\n{text[-6000:]}", flush=True)
    return {"status": status, "seconds": time.monotonic() - start, "tail": text[-2000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--skip", nargs="*", default=[], choices=list(LIMITS_S))
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    steps: dict[str, Callable[[], list[str] | None]] = {
        "build": build,
        "tests": tests,
        "sanitizer": sanitizer,
        "sweep": sweep,
        "measure": lambda: measure(output),
    }
    report: dict[str, Any] = {"schema": "clusterkv.gpu/1", "date": time.strftime("%Y-%m-%d")}
    for name, command in steps.items():
        if name not in options.skip:
            report[name] = run(name, command())
    measured = output / "gpu_operators.json"
    if measured.exists():
        report["results"] = json.loads(measured.read_text())
    (output / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = [name for name in steps if report.get(name, {}).get("status", "ok")[:2] not in "okno"]
    print(f"failed: {failed}" if failed else f"all steps ran; see {output / 'gpu.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
