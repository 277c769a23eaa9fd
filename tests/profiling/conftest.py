"""Synthetic traces on disk, and the real ones where they are present."""

import gzip
import json
import os
from pathlib import Path

import pytest

from clusterkv_ops.profiling.synth import synthesize
from clusterkv_ops.profiling.timeline import read_timeline

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("CLUSTERKV_DATA", ROOT.parent / "shared" / "data"))


def write_trace(path, trace):
    with gzip.open(path, "wt", compresslevel=1) as stream:
        json.dump(trace, stream)
    return path


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory):
    """`synthetic(kind)` -> (path, timeline, truth), made once."""
    made = {}

    def get(kind):
        if kind not in made:
            trace, truth = synthesize(kind, layers=3, steps=4)
            folder = tmp_path_factory.mktemp(kind)
            path = write_trace(folder / "run.kineto.json.gz", trace)
            made[kind] = (path, read_timeline(path), truth)
        return made[kind]

    return get


@pytest.fixture
def real_trace():
    """`real_trace(name)` -> path; skips where the data set is absent."""

    def get(name):
        path = DATA / "traces" / name
        if not path.exists():
            pytest.skip(f"{path} is absent: set CLUSTERKV_DATA to the folder of the test data")
        return path

    return get
