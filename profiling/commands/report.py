"""`report`: account for the time of a trace."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from clusterkv_ops.profiling.gates import failures, parse_gate
from clusterkv_ops.profiling.markdown import to_markdown
from clusterkv_ops.profiling.page import render_page
from clusterkv_ops.profiling.phases import MODES
from clusterkv_ops.profiling.report import Report, build_report
from clusterkv_ops.profiling.sources import open_timeline
from clusterkv_ops.profiling.tables import BY
from clusterkv_ops.profiling.terminal import print_report
from clusterkv_ops.profiling.timeline import Timeline

HELP = "where the time of a trace went: table, JSON, Markdown, HTML or PNG"
FORMATS = ("table", "md", "json", "html", "png")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("trace", metavar="TRACE|DIR", help="a trace file, or a folder with one")
    parser.add_argument("--mode", choices=MODES, default="all", help="which calls (default: all)")
    parser.add_argument("--by", choices=BY, default="phase", help="one row a ... (default: phase)")
    parser.add_argument("--format", choices=FORMATS, default="table")
    parser.add_argument("-o", "--output", type=Path, help="file to write (html and png need it)")
    parser.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="GATE",
        help="exit with 1 if it holds, e.g. 'prefill.clustering.exposed_pct>2'",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Writes the report, then judges the gates."""
    gates = [parse_gate(text) for text in arguments.fail_if]
    if arguments.format in ("html", "png") and arguments.output is None:
        raise ValueError(f"output: expected -o FILE with --format {arguments.format}")
    timeline = open_timeline(arguments.trace)
    report = build_report(timeline)
    if arguments.mode != "all" and report.mode(arguments.mode) is None:
        known = ", ".join(row.mode for row in report.modes)
        raise ValueError(f"mode: expected one of {known}, got {arguments.mode!r}")
    _write(report, timeline, arguments)
    failed = failures(gates, report)
    for text in failed:
        print(f"fail-if {text}", file=sys.stderr)
    return 1 if failed else 0


def _write(report: Report, timeline: Timeline, arguments: argparse.Namespace) -> None:
    output: Path | None = arguments.output
    if arguments.format == "png":
        from clusterkv_ops.profiling.png import save_png

        save_png(report, timeline, str(output))
    elif arguments.format == "table":
        with open(output, "w") if output else nullcontext(sys.stdout) as stream:
            print_report(report, arguments.by, arguments.mode, stream)
    else:
        text = _text(report, timeline, arguments)
        if output is None:
            print(text, end="")
        else:
            output.write_text(text)
    if output is not None:
        print(output)


def _text(report: Report, timeline: Timeline, arguments: argparse.Namespace) -> str:
    if arguments.format == "html":
        return render_page(report, timeline)
    if arguments.format == "md":
        return to_markdown(report, arguments.by, arguments.mode)
    return json.dumps(report.to_json(), indent=1) + "\n"
