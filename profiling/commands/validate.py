"""`validate`: whether a trace can be trusted."""

from __future__ import annotations

import argparse

from clusterkv_ops.profiling.sources import open_timeline
from clusterkv_ops.profiling.validation import validate

HELP = "check a trace: readable, linked, causal, complete"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("trace", metavar="TRACE|DIR")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the findings; 2 if any is an error."""
    found = validate(open_timeline(arguments.trace))
    for finding in found:
        print(f"{finding.level:8}{finding.text}")
    return 2 if any(finding.level == "error" for finding in found) else 0
