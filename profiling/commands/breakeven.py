"""`breakeven`: from which context on sparse decoding pays."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from clusterkv_ops.profiling.breakeven import (
    Point,
    break_even,
    breakeven_table,
    load_points,
    save_plot,
    to_json,
)
from clusterkv_ops.profiling.terminal import print_tables, stage_bar

HELP = "dense against sparse ms per token over context lengths, and where they cross"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("model", nargs="?", help="as for run (default: the demo's model)")
    parser.add_argument(
        "--contexts",
        type=_contexts,
        default=[1024, 2048, 4096, 8000],
        help="tokens, separated by commas (default: 1024,2048,4096,8000)",
    )
    parser.add_argument("--tokens", type=int, default=16, help="measured at each (default: 16)")
    parser.add_argument("--budget", type=int, default=1024, help="tokens a step (default: 1024)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--points", type=Path, help="measure nothing, read an earlier result")
    parser.add_argument("-o", "--output", type=Path, help="FILE.png or FILE.json")


def execute(arguments: argparse.Namespace) -> int:
    """Measures, prints the table and writes the picture or the JSON."""
    output: Path | None = arguments.output
    if output is not None and output.suffix not in (".png", ".json"):
        raise ValueError(f"output: expected a name in .png or .json, got {output.name!r}")
    if arguments.tokens < 1:
        raise ValueError(f"tokens: expected at least 1, got {arguments.tokens}")
    points = load_points(arguments.points) if arguments.points else _measure(arguments)
    found = break_even(points)
    print_tables([breakeven_table(found)])
    if output is not None and output.suffix == ".png":
        save_plot(found, output)
    elif output is not None:
        output.write_text(json.dumps(to_json(found), indent=1) + "\n")
    return 0


def _measure(arguments: argparse.Namespace) -> list[Point]:
    from clusterkv_ops.config import ClusterKVConfig
    from clusterkv_ops.profiling.demo import best_dtype, load_subject
    from clusterkv_ops.profiling.sweep import measure_points

    config = ClusterKVConfig(budget=arguments.budget)
    device = arguments.device
    subject = load_subject(arguments.model, dtype=best_dtype(device), device=device)
    with stage_bar() as on_context:
        return measure_points(
            subject,
            arguments.contexts,
            config=config,
            num_new=arguments.tokens,
            on_context=on_context,
        )


def _contexts(text: str) -> list[int]:
    contexts = sorted({int(part) for part in text.split(",")})
    if contexts[0] < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers, got {text!r}")
    return contexts
