"""`doctor`: what is installed, and which known breakage that means."""

from __future__ import annotations

import argparse
import platform

from clusterkv_ops.profiling.doctor import VERSIONS_OF, breakages, installed

HELP = "versions of everything the profiler can use, and known breakages"


def configure(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def execute(arguments: argparse.Namespace) -> int:
    """Prints versions and breakages; 1 if any part is broken."""
    versions = installed()
    print(f"{'python':20}{platform.python_version()}")
    for name in VERSIONS_OF:
        print(f"{name:20}{versions.get(name, 'not installed')}")
    found = breakages(versions)
    for text in found:
        print(f"broken: {text}")
    if not found:
        print("no known breakage")
    return 1 if found else 0
