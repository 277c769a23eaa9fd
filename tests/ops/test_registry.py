"""Completeness, asked of the dispatcher: every operator has all of its parts."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import clusterkv_ops as ck
from clusterkv_ops import reference, schemas

ROOT = Path(__file__).parents[2]
HAS_SOURCES = (ROOT / "csrc").is_dir()
CUDA_SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
WITHOUT_TENSORS = {"cpu_isa"}
VERBS = {name: name.rstrip("_") for name in schemas.SCHEMAS}
STEMS = {"clustering", "selection", "recall", "attention"}


def registered_operators() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    ours = (name.split("::")[1] for name in names if name.startswith("clusterkv::"))
    return {name.split(".")[0] for name in ours}


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"clusterkv::{name}", key)


def stem_of(name: str) -> str:
    """The file that an operator's oracle lives in, which names all its other files."""
    return inspect.getmodule(getattr(reference, name)).__name__.rsplit(".", 1)[1]


def test_the_schemas_are_the_operators() -> None:
    """Operators that the graph rewrite defines for itself live in its own namespace of names."""
    described = set(schemas.SCHEMAS) | WITHOUT_TENSORS
    assert set(schemas.SCHEMAS) <= registered_operators()
    assert {name for name in registered_operators() if not name.startswith("site")} <= described


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_an_operator_runs_on_both_devices(name: str) -> None:
    assert has_kernel(name, "CPU")
    assert has_kernel(name, "CUDA")


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_an_operator_has_a_fake(name: str) -> None:
    entry = torch._library.simple_registry.singleton.find(f"clusterkv::{name}")
    assert entry.fake_impl.kernel is not None or has_kernel(name, "Meta")


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_an_operator_has_an_oracle_with_its_arguments(name: str) -> None:
    arguments = getattr(torch.ops.clusterkv, name).default._schema.arguments
    oracle = inspect.signature(getattr(reference, name))
    assert list(oracle.parameters) == [argument.name for argument in arguments]


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_an_operator_has_a_documented_verb(name: str) -> None:
    verb = getattr(ck, VERBS[name])
    for section in ("Args:", "Returns:", "Raises:", "Note:", "Source:", "Example:"):
        assert section in verb.__doc__, f"{verb.__name__} documents no {section}"
    assert inspect.getmodule(verb).__name__ == f"clusterkv_ops.{stem_of(name)}"


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_an_operator_has_its_files(name: str) -> None:
    stem = stem_of(name)
    assert stem in STEMS
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert (Path(__file__).parent / f"test_{stem}.py").is_file()
    assert re.search(rf"opcheck\(\s*ops\.{name},", tests), f"no test calls opcheck on {name}"


@pytest.mark.skipif(not HAS_SOURCES, reason="the C++ sources are not part of an installed package")
@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_an_operator_has_a_cpu_kernel_in_source(name: str) -> None:
    source = (ROOT / "csrc" / "cpu" / f"{stem_of(name)}.cpp").read_text()
    assert f'm.impl("{name}"' in source


@pytest.mark.skipif(not CUDA_SOURCES, reason="csrc/cuda holds no sources: no CUDA kernels to find")
@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_an_operator_has_a_cuda_kernel_in_source(name: str) -> None:
    source = (ROOT / "csrc" / "cuda" / f"{stem_of(name)}.cu").read_text()
    assert f'm.impl("{name}"' in source


@pytest.mark.skipif(not CUDA_SOURCES, reason="csrc/cuda holds no sources: no CUDA kernels to find")
def test_cuda_kernels_can_be_attributed_by_name() -> None:
    """A trace of a replayed CUDA graph shows nothing but the kernels' names."""
    for path in (ROOT / "csrc" / "cuda").glob("*.cuh"):
        for kernel in re.findall(r"__global__[^;{(]*?(\w+)\s*\(", path.read_text()):
            assert kernel.startswith("clusterkv_") or kernel == "__launch_bounds__", path.name


def test_nothing_is_differentiable() -> None:
    """An operator has no backward, so the verbs refuse tensors that want one."""
    for name in schemas.SCHEMAS:
        assert not has_kernel(name, "Autograd")
