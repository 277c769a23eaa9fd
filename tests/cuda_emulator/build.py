"""Builds the CUDA sources for the host: a library of operators, and executables of kernels alone.

Everything goes to a folder named after what went in, so an unchanged source is built once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
CUDA_SOURCES = HERE.parents[1] / "csrc" / "cuda"
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


def find_cuda_headers() -> Path | None:
    """The folder of cuda_runtime.h: of a toolkit, or of NVIDIA's packages on PyPI."""
    places = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    places += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    places += sorted(Path(torch.__file__).parents[1].glob("nvidia/cu*"), reverse=True)
    for place in places:
        if (place / "include" / "cuda_bf16.h").exists():
            return place / "include"
    return None


def why_impossible() -> str | None:
    """What is missing for a build, or None."""
    if shutil.which("g++") is None:
        return "no g++"
    if os.uname().machine != "x86_64":
        return "the emulator switches fibres with x86-64 code"
    if find_cuda_headers() is None:
        return "no CUDA headers"
    return None


def build_library() -> Path:
    """Every operator, registered as `clusterkv_emulated` for CPU tensors."""
    torch_root = Path(torch.__file__).parent
    flags = ["-O1", "-fPIC", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    flags += ["-isystem", str(torch_root / "include")]
    link = ["-shared", f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    sources = [*sorted(CUDA_SOURCES.glob("*.cu")), HERE / "emulator.cpp"]
    return _build("emulated.so", sources, flags, link)


def build_executable(source: Path, *, sanitizer: str | None = None) -> Path:
    """A program of torch-free kernels, under "address" or "thread" or no sanitizer."""
    flags = ["-O1", "-g1"]
    emulator_flags = list(flags)
    if sanitizer == "address":
        flags.append("-fsanitize=address,bounds")
        flags.append("-fno-sanitize-recover=bounds")
        emulator_flags.append("-fsanitize=address")
    elif sanitizer == "thread":
        flags.append("-fsanitize=thread")
        emulator_flags.append("-DEMULATOR_TSAN")
    link = [f"-fsanitize={'address,bounds' if sanitizer == 'address' else sanitizer}"]
    name = f"{source.stem}.{sanitizer or 'plain'}"
    sources = [source, HERE / "emulator.cpp"]
    return _build(name, sources, flags, link if sanitizer else [], emulator_flags=emulator_flags)


def _build(
    name: str,
    sources: list[Path],
    flags: list[str],
    link: list[str],
    emulator_flags: list[str] | None = None,
) -> Path:
    folder = _cache_folder() / _digest(sources, flags + link)
    target = folder / name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder))
    objects = []
    for source in sources:
        is_emulator = source.name == "emulator.cpp" and emulator_flags is not None
        objects.append(_compile(source, scratch, emulator_flags if is_emulator else flags))
    _run(["g++", *map(str, objects), *link, "-o", str(scratch / name)])
    (scratch / name).replace(target)  # whole at once, also if two processes build
    shutil.rmtree(scratch)
    return target


def _compile(source: Path, folder: Path, flags: list[str] | None) -> Path:
    target = folder / (source.name + ".o")
    command = ["g++", "-x", "c++", "-std=c++20", *WARNINGS, *(flags or [])]
    command += ["-isystem", str(find_cuda_headers()), f"-I{CUDA_SOURCES}"]
    command += ["-include", str(HERE / "emulator.h"), "-c", str(source), "-o", str(target)]
    _run(command)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _cache_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"clusterkv_emulator_{os.getuid()}"


def _digest(sources: list[Path], options: list[str]) -> str:
    digest = hashlib.sha256(" ".join([torch.__version__, *options]).encode())
    headers = [*HERE.glob("*.h"), *CUDA_SOURCES.glob("*.cuh"), *CUDA_SOURCES.glob("*.h")]
    for path in sorted({*sources, *headers}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
