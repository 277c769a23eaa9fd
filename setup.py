"""Builds `clusterkv_ops._C` (CPU) and, where a CUDA torch meets nvcc, `clusterkv_ops._cuda`.

Environment:
    CLUSTERKV_NO_EXTENSION=1  install without compiled kernels: the reference runs instead, slowly.
    CLUSTERKV_CUDA=0|1        never / always build `_cuda` (default: when torch and nvcc allow it).
    TORCH_CUDA_ARCH_LIST      GPU architectures of `_cuda` (default below, used without a GPU too).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).parent
# The oldest torch whose stable ABI the libraries use: one build serves every torch from it on.
ABI_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
CXX_FLAGS = [
    "-O3",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",  # g++ 12 finds one in its own AVX-512 header
    "-Wno-uninitialized",
    ABI_TARGET,
]
DEFAULT_CUDA_ARCHITECTURES = "8.0;9.0"
PACKAGES = [
    "clusterkv_ops",
    "clusterkv_ops.graphs",
    "clusterkv_ops.profiling",
    "clusterkv_ops.profiling.commands",
    "clusterkv_ops.profiling.synth",
    "clusterkv_ops.reference",
]
PACKAGE_DATA = {
    "clusterkv_ops": ["py.typed"],
    "clusterkv_ops.profiling": ["static/*", "static/vendor/*"],
}


def find_cuda_home() -> str | None:
    """The toolkit that has headers. nvcc may be a wrapper script: it is asked where it lives."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        dry_run = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
        told = subprocess.run(dry_run, capture_output=True, text=True, check=False).stderr
        places += re.findall(r"^#\$ TOP=(.*)$", told, re.MULTILINE)
    places.append("/usr/local/cuda")
    for place in places:
        if place and (Path(place) / "include" / "cuda_runtime.h").exists():
            return str(Path(place).resolve())
    return None


def sources(folder: str, *patterns: str) -> list[str]:
    """Paths relative to the root, in a fixed order."""
    found = [path for pattern in patterns for path in (ROOT / folder).glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def headers(folder: str) -> list[str]:
    """Files whose change makes a rebuild necessary."""
    return sources(folder, "*.h", "*.cuh", "*.inl")


def extensions() -> list[Any]:
    """`_C`, and `_cuda` where it can be built."""
    import torch

    cuda_home = find_cuda_home()
    if cuda_home:
        os.environ["CUDA_HOME"] = cuda_home  # torch reads it when cpp_extension is imported
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    built = [
        CppExtension(
            "clusterkv_ops._C",
            sources("csrc/cpu", "*.cpp"),
            depends=headers("csrc") + headers("csrc/cpu"),
            extra_compile_args={"cxx": CXX_FLAGS},
            py_limited_api=True,
        )
    ]
    wish = os.environ.get("CLUSTERKV_CUDA", "auto")
    possible = torch.version.cuda is not None and cuda_home is not None
    cuda_sources = sources("csrc/cuda", "*.cu", "*.cpp")
    has_cuda = bool(cuda_sources) and (wish == "1" or (wish == "auto" and possible))
    if has_cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHITECTURES)
        built.append(
            CUDAExtension(
                "clusterkv_ops._cuda",
                cuda_sources,
                depends=headers("csrc") + headers("csrc/cuda"),
                extra_compile_args={
                    "cxx": [*CXX_FLAGS, "-DUSE_CUDA"],
                    "nvcc": ["-O3", "-DUSE_CUDA", ABI_TARGET],
                },
                py_limited_api=True,
            )
        )
    print(f"clusterkv-ops: torch {torch.__version__}, _cuda: {has_cuda}", file=sys.stderr)
    return built


def build_command() -> Any:
    """torch's build_ext, which says what to do when there is no working compiler."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildKernels(BuildExtension):  # type: ignore[misc]
        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                raise SystemExit(
                    f"clusterkv-ops: its C++ kernels were not built: {error}\n"
                    "They need a C++17 compiler (g++ 11 or later is tested). To install without "
                    "them, with slow reference implementations, set CLUSTERKV_NO_EXTENSION=1."
                ) from error

    return BuildKernels


def build_arguments() -> dict[str, Any]:
    """What `setup` gets besides the static metadata of pyproject.toml."""
    if os.environ.get("CLUSTERKV_NO_EXTENSION") == "1":
        return {}
    try:
        return {
            "ext_modules": extensions(),
            "cmdclass": {"build_ext": build_command()},
            "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
        }
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"clusterkv-ops: building its kernels needs torch ({error}). Install torch, then "
            "run: pip install --no-build-isolation -e ."
        ) from error


setup(packages=PACKAGES, package_data=PACKAGE_DATA, **build_arguments())
