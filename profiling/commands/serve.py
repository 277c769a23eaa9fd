"""`serve`: TensorBoard on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "TensorBoard on 127.0.0.1, with the ClusterKV tab"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--logdir", type=Path, required=True)
    parser.add_argument("--port", type=int, default=6006, help="0: any free one (default: 6006)")
    parser.add_argument(
        "--offline-plugin",
        action="store_true",
        help="make torch-tb-profiler's pages work without internet",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Serves until interrupted."""
    if not arguments.logdir.is_dir():
        raise ValueError(f"logdir: expected a folder, got {arguments.logdir}")
    from clusterkv_ops.profiling.server import serve

    return serve(arguments.logdir, arguments.port, is_offline=arguments.offline_plugin)
