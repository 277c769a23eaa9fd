"""`synth`: write a trace whose true numbers are known."""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import asdict
from pathlib import Path

from clusterkv_ops.profiling.synth import KINDS, synthesize

HELP = "write a synthetic trace with known truth"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("-o", "--output", type=Path, required=True, help="FILE.json or .json.gz")
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="overlapped",
        help="; ".join(f"{name}: {what}" for name, what in KINDS.items()),
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="decode steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--truth", type=Path, help="also write the true numbers, in nanoseconds")


def execute(arguments: argparse.Namespace) -> int:
    """Writes the trace, and the truth if asked."""
    trace, truth = synthesize(
        arguments.kind, layers=arguments.layers, steps=arguments.steps, seed=arguments.seed
    )
    text = json.dumps(trace).encode()
    output: Path = arguments.output
    output.write_bytes(gzip.compress(text, mtime=0) if output.suffix == ".gz" else text)
    print(output)
    if arguments.truth:
        answer = {mode: asdict(numbers) for mode, numbers in truth.items()}
        arguments.truth.write_text(json.dumps(answer, indent=1) + "\n")
        print(arguments.truth)
    return 0
