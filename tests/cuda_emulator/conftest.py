"""The CUDA kernels, run on the host by the emulator, as implementations of the operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clusterkv_ops import schemas
from tests.cuda_emulator import build

NAMESPACE = "clusterkv_emulated"


@pytest.fixture(scope="session")
def emulated() -> Iterator[Any]:
    """`torch.ops.clusterkv_emulated`: the CUDA source of every operator, for CPU tensors."""
    reason = build.why_impossible()
    if reason is not None:
        pytest.skip(f"the CUDA kernels were NOT tested: {reason}")
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in schemas.SCHEMAS.items():
        library.define(name + schema)
    torch.ops.load_library(str(build.build_library()))
    yield getattr(torch.ops, NAMESPACE)
    library._destroy()


@pytest.fixture
def device(emulated: Any) -> Iterator[torch.device]:
    """The CPU, with the emulated CUDA kernels behind every `clusterkv::` operator."""
    library = torch.library.Library(schemas.NAMESPACE, "IMPL")
    for name in schemas.SCHEMAS:
        library.impl(name, getattr(emulated, name), "CPU", allow_override=True)
    yield torch.device("cpu")
    library._destroy()
