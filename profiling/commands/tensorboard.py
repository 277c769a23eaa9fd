"""`tensorboard`: write everything about a run into a log directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from clusterkv_ops.profiling.event_files import can_write_events, write_run
from clusterkv_ops.profiling.report import build_report
from clusterkv_ops.profiling.sources import open_timeline

HELP = "write curves, figures, page and trace of a run into a TensorBoard log directory"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("trace", metavar="TRACE|DIR")
    parser.add_argument("--logdir", type=Path, required=True)
    parser.add_argument("--name", help="of the run (default: the trace's name)")


def execute(arguments: argparse.Namespace) -> int:
    """Writes the files and lists them."""
    if not can_write_events():
        raise ImportError("this needs TensorBoard: pip install 'clusterkv-ops[profile]'")
    timeline = open_timeline(arguments.trace)
    name = arguments.name or timeline.trace.path.name.split(".")[0]
    for path in write_run(build_report(timeline), timeline, arguments.logdir / name):
        print(path)
    return 0
