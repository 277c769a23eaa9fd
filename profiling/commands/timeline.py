"""`timeline`: draw one step, one layer or any window, lane by lane."""

from __future__ import annotations

import argparse
from pathlib import Path

from clusterkv_ops.profiling.page import document, head, legend
from clusterkv_ops.profiling.pictures import LanePicture, lane_picture
from clusterkv_ops.profiling.sources import open_timeline
from clusterkv_ops.profiling.svg import draw_lanes, standalone
from clusterkv_ops.profiling.timeline import Timeline

HELP = "draw a step, a layer or a window of time as SVG, PNG or HTML"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("trace", metavar="TRACE|DIR")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, help="decode step (of a foreign trace: ProfilerStep)")
    what.add_argument("--layer", type=int, help="from the layer's first span to its last one")
    what.add_argument("--window", metavar="A:B", help="milliseconds since the first event")
    parser.add_argument("--mode", default="decode", help="of --step (default: decode)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="FILE.svg, .png or .html")


def execute(arguments: argparse.Namespace) -> int:
    """Writes the picture."""
    output: Path = arguments.output
    if output.suffix not in (".svg", ".png", ".html"):
        raise ValueError(f"output: expected a name in .svg, .png or .html, got {output.name!r}")
    timeline = open_timeline(arguments.trace)
    picture = _picture(timeline, arguments)
    if not picture.rows:
        raise ValueError(f"nothing runs in {picture.title}")
    if output.suffix == ".png":
        from clusterkv_ops.profiling.png import save_lanes_png

        save_lanes_png(picture, output)
    elif output.suffix == ".svg":
        output.write_text(standalone(picture))
    else:
        phases = {box.phase for row in picture.rows for box in row.boxes}
        body = head(picture.title, timeline.trace.path.name) + legend(phases) + draw_lanes(picture)
        output.write_text(document(picture.title, body))
    print(output)
    return 0


def _picture(timeline: Timeline, arguments: argparse.Namespace) -> LanePicture:
    if arguments.step is not None:
        return _step(timeline, arguments.mode, arguments.step)
    if arguments.layer is not None:
        return _layer(timeline, arguments.layer)
    start, end = _window(arguments.window)
    origin = timeline.windows("all")[0][0] if timeline.spans else 0
    title = f"{arguments.window} ms"
    return lane_picture(timeline, origin + start, origin + end, title)


def _step(timeline: Timeline, mode: str, step: int) -> LanePicture:
    calls = {call.number: call for call in timeline.calls if call.mode == mode}
    if not calls and mode == "decode":
        calls = {call.number: call for call in timeline.calls if call.mode == "step"}
    if step not in calls:
        known = f"{min(calls)} to {max(calls)}" if calls else f"no {mode} call in this trace"
        raise ValueError(f"step: expected {known}, got {step}")
    call = calls[step]
    return lane_picture(timeline, call.start, call.end, f"{call.mode} {step}")


def _layer(timeline: Timeline, layer: int) -> LanePicture:
    """The layer in the first call that has it."""
    spans = [span for span in timeline.spans if span.layer == layer]
    if not spans:
        layers = sorted({span.layer for span in timeline.spans if span.layer is not None})
        known = f"one of {', '.join(map(str, layers))}" if layers else "a trace with layers"
        raise ValueError(f"layer: expected {known}, got {layer}")
    ends = [call.end for call in timeline.calls if call.start <= spans[0].start < call.end]
    first = [span for span in spans if not ends or span.start < ends[0]]
    start, end = first[0].start, max(span.end for span in first)
    margin = (end - start) // 20
    return lane_picture(timeline, start - margin, end + margin, f"Layer {layer}, first call")


def _window(text: str) -> tuple[int, int]:
    try:
        start, end = (round(float(part) * 1e6) for part in text.split(":"))
    except ValueError:
        raise ValueError(f"window: expected A:B in milliseconds, got {text!r}") from None
    if start >= end:
        raise ValueError(f"window: expected A < B, got {text!r}")
    return start, end
