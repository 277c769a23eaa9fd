"""Compiles every CUDA source for every supported architecture, without a GPU or a CUDA torch.

    python -m tests.cuda_emulator.compile_check [--arch 90 ...] [--json FILE]

Warnings are errors and no kernel may spill registers. Prints registers a thread and static shared
memory of each kernel. The sources include torch's stable headers, which a CPU build has too, so
this also checks the binding.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
ARCHITECTURES = ["80", "90", "100", "120"]
FLAGS = ["-O3", "-std=c++17", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
STRICT = ["-Xptxas=-v,--warn-on-spills", "-Werror=all-warnings", "-Xcompiler=-Wall,-Werror"]
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?[^\n]*",
    re.DOTALL,
)


class Kernel(NamedTuple):
    """What ptxas said about one kernel on one architecture."""

    name: str
    arch: str
    registers: int
    shared_bytes: int
    spill_bytes: int


def compile_source(source: Path, architectures: list[str]) -> list[Kernel]:
    """The kernels of one file. Raises with the compiler's words where it complains."""
    headers = Path(torch.__file__).parent / "include"
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", *FLAGS, *STRICT, *targets, "-isystem", str(headers)]
        command += ["-c", str(source), "-o", str(Path(folder) / "out.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{source.name}:\n{done.stdout}{done.stderr}")
    kernels = parse_report(done.stderr)
    if not kernels:
        raise SystemExit(f"{source.name}: no kernel in the report of ptxas")
    return kernels


def parse_report(text: str) -> list[Kernel]:
    """The kernels in a report of `ptxas -v`."""
    kernels = []
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", text):
        match = ENTRY.search(part)
        if match is None:
            continue
        spilled = int(match["stores"]) + int(match["loads"])
        shared = int(match["shared"] or 0)
        kernels.append(
            Kernel(match["name"], match["arch"], int(match["registers"]), shared, spilled)
        )
    return kernels


def demangled(names: list[str]) -> list[str]:
    """Readable names: the kernel and its template arguments."""
    filtered = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    short = [
        re.sub(r"^void |\(.*\)$|clusterkv::|\((?=\d)|(?<=\d)\)", "", name) for name in filtered
    ]
    return [name.replace("__nv_bfloat16", "bf16").replace("__half", "fp16") for name in short]


def print_table(kernels: list[Kernel], architectures: list[str]) -> None:
    """A line a kernel: registers on each architecture, and shared memory."""
    by_name: dict[str, dict[str, Kernel]] = {}
    for kernel, name in zip(kernels, demangled([k.name for k in kernels]), strict=True):
        by_name.setdefault(name, {})[kernel.arch] = kernel
    width = max(map(len, by_name))
    heads = "".join(f"{'sm_' + arch:>8}" for arch in architectures)
    print(f"{'registers a thread':<{width}}{heads}{'shared B':>10}{'spilled B':>11}")
    for name, found in sorted(by_name.items()):
        registers = "".join(
            f"{found[arch].registers if arch in found else '-':>8}" for arch in architectures
        )
        shared = max(kernel.shared_bytes for kernel in found.values())
        spilled = sum(kernel.spill_bytes for kernel in found.values())
        print(f"{name:<{width}}{registers}{shared:>10}{spilled:>11}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("no nvcc: the CUDA sources were NOT compiled", file=sys.stderr)
        return 0
    kernels = []
    for source in sorted(SOURCES.glob("*.cu")):
        print(source.name, file=sys.stderr)
        kernels += compile_source(source, options.arch)
    print_table(kernels, options.arch)
    if options.json:
        options.json.write_text(json.dumps([kernel._asdict() for kernel in kernels], indent=1))
    faults = [k.name for k in kernels if k.spill_bytes or not k.name.count("clusterkv_")]
    if faults:
        print(f"spilled registers, or a name without clusterkv_: {faults}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
