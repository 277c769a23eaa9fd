"""`python -m clusterkv_ops.profile`: record, account for and show the time of a ClusterKV run.

Exit codes: 0 done, 1 a gate failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

# Each module has HELP, configure(parser) and execute(arguments) -> exit code.
COMMANDS = {
    "run": "clusterkv_ops.profiling.commands.run",
    "report": "clusterkv_ops.profiling.commands.report",
    "compare": "clusterkv_ops.profiling.commands.compare",
    "breakeven": "clusterkv_ops.profiling.commands.breakeven",
    "timeline": "clusterkv_ops.profiling.commands.timeline",
    "tensorboard": "clusterkv_ops.profiling.commands.tensorboard",
    "serve": "clusterkv_ops.profiling.commands.serve",
    "synth": "clusterkv_ops.profiling.commands.synth",
    "validate": "clusterkv_ops.profiling.commands.validate",
    "doctor": "clusterkv_ops.profiling.commands.doctor",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.execute(arguments)
    except (ValueError, OSError, ImportError) as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m clusterkv_ops.profile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module_name in COMMANDS.items():
        module = import_module(module_name)
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.configure(command)
        command.set_defaults(execute=module.execute)
    return parser


if __name__ == "__main__":
    sys.exit(main())
