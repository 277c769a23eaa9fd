"""Every instruction set that the CPU kernels were compiled for computes the oracle's results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clusterkv_ops.schemas import has_cpu_kernels

LEVELS = ["base", "avx2", "avx512", "avx512_bf16"]
FLAGS = {
    "base": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
}
SIZES = "(oracle and (150-9-64 or 120-9-33 or 120-9-256))"
ORACLE_TESTS = f"cpu and ({SIZES} or huge_logits or lower_cluster)"


def cpu_flags() -> set[str]:
    """What this CPU can do, as Linux says it; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def run_at(level: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CLUSTERKV_CPU_ISA": level},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.skipif(not has_cpu_kernels, reason="clusterkv_ops._C is not built")
@pytest.mark.parametrize("level", LEVELS)
def test_a_level_computes_the_oracles_results(level: str) -> None:
    """The oracle tests once more, in a process of their own: a level is chosen at load time."""
    missing = FLAGS[level] - cpu_flags()
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}: {level} kernels did NOT run")
    if level == torch.ops.clusterkv.cpu_isa():
        pytest.skip(f"{level} is what every other test of this run uses")
    folder = Path(__file__).parent
    stems = ("clustering", "selection", "attention")
    files = [str(folder / f"test_{stem}.py") for stem in stems]
    options = ("-q", "-x", "-p", "no:cacheprovider", "-k", ORACLE_TESTS)
    done = run_at(level, "-m", "pytest", *options, *files)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


@pytest.mark.skipif(not has_cpu_kernels, reason="clusterkv_ops._C is not built")
def test_the_environment_chooses_the_level() -> None:
    program = "import torch, clusterkv_ops; print(torch.ops.clusterkv.cpu_isa())"
    best = run_at("", "-c", program).stdout.strip()
    assert run_at("base", "-c", program).stdout.strip() == "base"
    assert best in LEVELS
    assert run_at(LEVELS[-1], "-c", program).stdout.strip() == best  # the best that the CPU has
