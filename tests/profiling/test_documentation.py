"""docs/profiling.md names every field of the report, and nothing else."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from clusterkv_ops.profiling.phases import PHASES
from clusterkv_ops.profiling.report import _ROWS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "profiling.md").read_text()


@pytest.mark.parametrize("name", _ROWS)
def test_every_field_is_documented(name):
    line = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |"))
    documented = re.findall(r"`(\w+)`", line)[1:]
    assert documented == [field.name for field in fields(_ROWS[name])]


def test_every_phase_is_documented():
    assert [phase for phase in PHASES if phase not in TEXT] == []
