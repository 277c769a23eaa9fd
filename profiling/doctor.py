"""Versions of what the profiler can use, and what is known to break with which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

VERSIONS_OF = (
    "torch",
    "tensorboard",
    "torch-tb-profiler",
    "setuptools",
    "pandas",
    "numpy",
    "protobuf",
    "matplotlib",
    "rich",
)


def installed() -> dict[str, str]:
    """Name -> version of what is installed; nothing is imported."""
    versions: dict[str, str] = {}
    for name in VERSIONS_OF:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def breakages(versions: Mapping[str, str]) -> list[str]:
    """A sentence with the cure for each combination that is known to fail."""
    found = []
    tensorboard = _numbers(versions.get("tensorboard"))
    plugin = _numbers(versions.get("torch-tb-profiler"))
    if tensorboard and tensorboard < (2, 21) and _numbers(versions.get("setuptools")) >= (81,):
        found.append(
            "tensorboard before 2.21 imports pkg_resources, which setuptools 81 removes: "
            "pip install 'tensorboard>=2.21'"
        )
    if plugin and _numbers(versions.get("pandas")) >= (4,):
        found.append("torch-tb-profiler fails with pandas 4: pip install 'pandas<4'")
    if plugin and plugin < (0, 4, 3):
        found.append("torch-tb-profiler before 0.4.3: pip install torch-tb-profiler==0.4.3")
    if plugin and not tensorboard:
        found.append("torch-tb-profiler without tensorboard: pip install 'tensorboard>=2.21'")
    return found


def _numbers(text: str | None) -> tuple[int, ...]:
    """The release of a version, () of nothing: "2.21.0+cpu" -> (2, 21, 0)."""
    found = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in found[0].split(".")) if found else ()
