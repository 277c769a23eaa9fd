"""The package without compiled kernels: it imports, warns once, and runs the reference."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import clusterkv_ops

PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import clusterkv_ops as ck
    from clusterkv_ops import schemas
    assert not schemas.has_cpu_kernels
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 2, 100, 32)
    query = torch.randn(2, 4, 1, 32)
    index = ck.cluster_keys(keys[:, :, 16:], num_clusters=8)
    selection = ck.select_clusters(query, index, budget=100)
    selection = selection._replace(indices=selection.indices[:, :, :84] + 16)
    cache = ck.empty_cache(keys, num_slots=100)
    recalled = ck.recall(keys, values, selection, cache)
    spans = ck.always_attended(100, num_sink_tokens=16, num_recent_tokens=0, batch_size=2)
    state = ck.selected_attention(
        query, keys, values, selection, spans=spans, recalled=recalled, cache=cache
    )
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), enable_gqa=True
    )
ours = [str(warning.message) for warning in caught if "clusterkv" in str(warning.message)]
print(len(ours), ours[0].split(":")[0], float((state.out - exact).abs().max()) < 1e-5)
"""


@pytest.fixture
def bare_package(tmp_path: Path) -> Path:
    """A copy of the package without its libraries, links followed."""
    source = Path(clusterkv_ops.__file__).parent
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(source, tmp_path / "clusterkv_ops", ignore=ignored)
    return tmp_path


def test_it_warns_once_and_computes_the_same(bare_package: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(bare_package)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=bare_package,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1 clusterkv_ops._C is not built True"


def test_importing_it_imports_no_model_library(bare_package: Path) -> None:
    """`import clusterkv_ops` costs what `import torch` costs."""
    program = (
        "import sys, clusterkv_ops; "
        "heavy = ('transformers', 'torch._inductor', 'pandas', 'matplotlib', 'tensorboard'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=bare_package,
        env={**os.environ, "PYTHONPATH": str(bare_package)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"
