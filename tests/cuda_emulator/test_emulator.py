"""The emulator and the sanitizers find faults, and find none in the kernels."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cuda_emulator import build

HERE = Path(__file__).parent

FOUND_BY_THE_EMULATOR = {
    "divergent_barrier": "divergent barrier: others wait at",
    "barrier_after_exit": "a barrier after 16 threads have exited",
    "missing_lane": "names lanes that have exited",
    "lane_at_a_barrier": "deadlock: waits at a",
    "lane_outside_its_mask": "the lane is not in its own mask 0000ffff",
    "shuffle_from_outside_the_mask": "shuffle reads lane 20, not in mask 0000ffff",
    "different_collectives": "the other lanes wait at",
    "copy_that_nobody_waits_for": "exits before its copies have arrived",
}
FOUND_BY_ADDRESS_SANITIZER = ["out_of_shared_memory", "out_of_global_memory"]
FOUND_BY_THREAD_SANITIZER = ["race", "race_inside_a_warp"]


def run(program: str, sanitizer: str | None, *arguments: str) -> tuple[int, str]:
    reason = build.why_impossible()
    if reason is not None:
        pytest.skip(f"the CUDA kernels were NOT tested: {reason}")
    path = build.build_executable(HERE / f"{program}.cpp", sanitizer=sanitizer)
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66"}
    command = ["setarch", "-R", str(path), *arguments]  # TSan wants its usual addresses
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **options}
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FOUND_BY_THE_EMULATOR)
def test_the_emulator_reports_a_fault(fault: str) -> None:
    code, text = run("faults", None, fault)
    assert code == 3
    assert FOUND_BY_THE_EMULATOR[fault] in text
    assert ("faults.cpp:" in text) == (fault != "copy_that_nobody_waits_for")
    assert f"[{fault} block (0,0,0) thread (" in text


@pytest.mark.parametrize("fault", FOUND_BY_ADDRESS_SANITIZER)
def test_address_sanitizer_reports_a_fault(fault: str) -> None:
    code, text = run("faults", "address", fault)
    assert code == 1
    assert "heap-buffer-overflow" in text
    assert "faults.cpp:" in text


@pytest.mark.parametrize("fault", FOUND_BY_THREAD_SANITIZER)
def test_thread_sanitizer_reports_a_fault(fault: str) -> None:
    code, text = run("faults", "thread", fault)
    assert code == 66
    assert "data race" in text
    assert "faults.cpp:" in text


@pytest.mark.parametrize("sanitizer", [None, "address", "thread"])
def test_nothing_is_reported_without_a_fault(sanitizer: str | None) -> None:
    assert run("faults", sanitizer, "no_fault") == (0, "")


@pytest.mark.parametrize("sanitizer", [None, "address", "thread"])
def test_the_kernels_have_no_fault(sanitizer: str | None) -> None:
    code, text = run("small_cases", sanitizer)
    assert (code, text) == (0, "all kernels ran\n"), text[:5000]
