"""`breakeven`: from which context on sparse decoding pays."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from clusterkv_ops.profiling.breakeven import (
    break_even,
    breakeven_table,
    load_points,
    save_plot,
    to_json,
)
from clusterkv_ops.profiling.terminal import print_tables

HELP = "dense against sparse ms per token over context lengths, and where they cross"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--points", type=Path, required=True, help="JSON with measured points")
    parser.add_argument("-o", "--output", type=Path, help="FILE.png or FILE.json")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the table and writes the picture or the JSON."""
    output: Path | None = arguments.output
    if output is not None and output.suffix not in (".png", ".json"):
        raise ValueError(f"output: expected a name in .png or .json, got {output.name!r}")
    found = break_even(load_points(arguments.points))
    print_tables([breakeven_table(found)])
    if output is not None and output.suffix == ".png":
        save_plot(found, output)
    elif output is not None:
        output.write_text(json.dumps(to_json(found), indent=1) + "\n")
    return 0
