"""`compare`: how much of the overhead overlap hides, by the wall clock."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from clusterkv_ops.profiling.comparison import (
    comparison_tables,
    difference_rows,
    hiding_rows,
)
from clusterkv_ops.profiling.markdown import markdown_table
from clusterkv_ops.profiling.sources import open_report
from clusterkv_ops.profiling.terminal import print_tables

HELP = "wall-clock hiding of three runs, and the differences of their phases"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    for name, what in (
        ("base", "the model without the method"),
        ("serial", "with everything on the main lane"),
        ("overlap", "as it is meant"),
    ):
        parser.add_argument(
            name, metavar=name.upper(), help=f"{what}: trace, folder or report.json"
        )
    parser.add_argument("--format", choices=("table", "md", "json"), default="table")


def execute(arguments: argparse.Namespace) -> int:
    """Prints both tables."""
    runs = [open_report(path) for path in (arguments.base, arguments.serial, arguments.overlap)]
    if arguments.format == "json":
        answer = {
            "schema": "clusterkv.comparison/1",
            "hiding": [asdict(row) for row in hiding_rows(*runs)],
            "exposed": [asdict(row) for row in difference_rows(*runs)],
        }
        print(json.dumps(answer, indent=1))
        return 0
    found = comparison_tables(*runs)
    if not found[0].rows:
        raise ValueError("the three runs have no mode in common")
    if arguments.format == "md":
        print("\n\n".join(f"### {table.title}\n\n{markdown_table(table)}" for table in found))
    else:
        print_tables(found)
    return 0
