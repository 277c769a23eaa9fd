"""The CUDA kernels, run on the host by the emulator, as implementations of the operators."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clusterkv_ops import schemas
from tests.cuda_emulator import build

NAMESPACE = "clusterkv_emulated"
# Of the operators' tables every fourth case runs, or all of them where this is set to 1.
ALL_CASES = os.environ.get("CLUSTERKV_EMULATE_ALL") == "1"
EVERY = 4  # and three dtypes: each of them is met


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin out the tables of tests/ops, which the emulator is slow at."""
    seen: Counter[str] = Counter()
    kept, dropped = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        is_table = "cuda_emulator/test_operator_tables" in name
        drop = is_table and not ALL_CASES and seen[name] % EVERY != 0
        (dropped if drop else kept).append(item)
        seen[name] += 1
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


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
