"""What every test may ask for: a device, and a fixed number of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

REQUIRE_CUDA = os.environ.get("CLUSTERKV_REQUIRE_CUDA") == "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn. Without a GPU its tests are skipped, or fail where it is required."""
    if request.param == "cuda" and not torch.cuda.is_available():
        if REQUIRE_CUDA:
            pytest.fail("CLUSTERKV_REQUIRE_CUDA=1, but torch finds no CUDA device")
        pytest.skip("no CUDA device: this test did NOT run on a GPU")
    return torch.device(request.param)


@pytest.fixture
def num_threads() -> Iterator[None]:
    """A test that changes torch's number of threads gets it restored."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
