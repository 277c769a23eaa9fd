"""The pictures as SVG fragments. Colours are classes, so that one page can change its theme.

Every mark carries `data-tip`, which the page shows when the pointer is on it.
"""

from __future__ import annotations

from html import escape

from clusterkv_ops.profiling.headline import milliseconds, share
from clusterkv_ops.profiling.pictures import Bar, Box, LanePicture, Share, is_exposed
from clusterkv_ops.profiling.theme import pattern_definitions, stylesheet

WIDTH = 1160
_LEFT = 160
_LANE = 38
_CHARACTER = 6.6


def draw_lanes(picture: LanePicture) -> str:
    """Lanes from top to bottom, time from left to right, red where overhead is exposed."""
    height = len(picture.rows) * _LANE
    scale = (WIDTH - _LEFT - 10) / max(picture.end - picture.start, 1)

    def x(time: int) -> float:
        return _LEFT + (time - picture.start) * scale

    marks = [_exposed(x(a), x(b), height, b - a) for a, b in picture.exposed]
    for i, (role, name, boxes) in enumerate(picture.rows):
        y = 8 + i * _LANE
        marks.append(f'<line class="rule" x1="0" x2="{WIDTH}" y1="{y - 4}" y2="{y - 4}"/>')
        marks.append(f'<text class="lane" x="0" y="{y + 13}">{role}</text>')
        marks.append(f'<text class="note" x="0" y="{y + 27}">{escape(_short(name, 22))}</text>')
        marks += [_box(box, x(box.start), x(box.end), y) for box in boxes]
        marks += [
            _label(phase, phase, x(start), x(end) - x(start), y)
            for phase, start, end in _runs(boxes, 1 / scale)
        ]
    marks.append(_time_axis(picture, height + 8))
    return _figure(picture.title, height + 34, marks)


def draw_shares(rows: list[tuple[str, list[Share]]]) -> str:
    """One bar a mode, 100 % wide: model, exposed overhead, idle."""
    marks = []
    for i, (mode, pieces) in enumerate(rows):
        y = 4 + i * 46
        marks.append(f'<text class="lane" x="0" y="{y + 20}">{escape(mode)}</text>')
        if not pieces:
            marks.append(f'<text class="note" x="{_LEFT}" y="{y + 20}">unreliable</text>')
        at = float(_LEFT)
        for piece in pieces:
            width = (WIDTH - _LEFT - 10) * piece.percent / 100
            tip = f"{piece.phase}: {share(piece.percent)}, {milliseconds(piece.microseconds)}"
            marks.append(_rectangle(piece.phase, at, y, width, 30, tip))
            marks.append(
                _label(f"{piece.phase} {share(piece.percent)}", piece.phase, at, width, y)
            )
            at += width
    return _figure("Where the wall time goes", 8 + 46 * len(rows), marks)


def draw_bars(bars: list[Bar]) -> str:
    """One bar an overhead phase: the hidden part, then the exposed part, edged in red."""
    longest = max((bar.busy_us for bar in bars), default=1.0)
    room = WIDTH - _LEFT - 330
    marks = []
    for i, bar in enumerate(bars):
        y = 4 + i * 34
        width = max(room * bar.busy_us / longest, 1.0)
        hidden = width * (bar.hidden_pct or 0) / 100
        tip = f"{bar.mode} {bar.phase}: busy {milliseconds(bar.busy_us)}"
        marks.append(f'<text class="lane" x="0" y="{y + 17}">{bar.mode} {bar.phase}</text>')
        marks.append(_rectangle(bar.phase, _LEFT, y, hidden, 24, f"{tip}, hidden"))
        if is_exposed(bar):
            edge = f"{tip}, exposed"
            marks.append(
                _rectangle(bar.phase, _LEFT + hidden, y, width - hidden, 24, edge, "bare")
            )
        x = _LEFT + width + 8
        marks.append(f'<text class="note" x="{x:.1f}" y="{y + 17}">{escape(_facts(bar))}</text>')
    return _figure(
        "Overhead phases: hidden under the model, or exposed", 8 + 34 * len(bars), marks
    )


def draw_curve(points: list[tuple[float, float]], title: str) -> str:
    """Shares between 0 and 1 over steps."""
    height, top = 150, 10
    first, last = points[0][0], points[-1][0]
    scale = (WIDTH - _LEFT - 10) / max(last - first, 1)
    marks = []
    for percent in (0, 25, 50, 75, 100):
        y = top + height * (1 - percent / 100)
        marks.append(f'<line class="rule" x1="{_LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4}">{percent} %</text>')
    places = [(_LEFT + (s - first) * scale, top + height * (1 - rate)) for s, rate in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks.append(f'<polyline class="curve" points="{path}"/>')
    for (x, y), (step, rate) in zip(places, points, strict=True):
        tip = f"step {step:g}: {share(100 * rate)}"
        marks.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5" data-tip="{tip}"/>')
    bottom = top + height + 18
    marks.append(f'<text class="tick" x="{_LEFT}" y="{bottom}">step {first:g}</text>')
    marks.append(f'<text class="tick end" x="{WIDTH - 10}" y="{bottom}">step {last:g}</text>')
    return _figure(title, bottom + 8, marks)


def standalone(picture: LanePicture) -> str:
    """The lanes as a file of their own, with its colours and its title."""
    drawn = draw_lanes(picture)
    inner = int(drawn.split('viewBox="0 0 ', 1)[1].split('"')[0].split()[1])
    placed = drawn.replace('width="100%"', f'x="10" y="26" width="{WIDTH}" height="{inner}"', 1)
    height = inner + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 20} {height}" '
        f'width="{WIDTH + 20}" height="{height}"><style>{stylesheet()}{_RULES}</style>'
        f'<rect width="100%" height="100%" fill="var(--page)"/>{pattern_definitions()}'
        f'<text class="lane" x="10" y="18">{escape(picture.title)}</text>'
        f"{placed}</svg>\n"
    )


_RULES = """
text{font:12px "DejaVu Sans",sans-serif;fill:var(--text)} .lane{font-weight:600}
.note,.tick{fill:var(--muted)} .in{text-anchor:middle;paint-order:stroke;stroke-width:3px}
.rule,.tick-mark{stroke:var(--line)} .exposed{fill:var(--exposed);opacity:var(--shade)}
.exposed-edge{fill:var(--exposed)}
"""


def _figure(title: str, height: float, marks: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="100%" role="img" '
        f'aria-label="{escape(title)}">{"".join(marks)}</svg>'
    )


def _exposed(left: float, right: float, height: int, time: int) -> str:
    width = max(right - left, 0.6)
    tip = f"overhead without model compute: {milliseconds(time / 1e3)}"
    return (
        f'<rect class="exposed" x="{left:.2f}" y="4" width="{width:.2f}" height="{height}" '
        f'data-tip="{tip}"/><rect class="exposed-edge" x="{left:.2f}" y="0" '
        f'width="{width:.2f}" height="4"/>'
    )


def _box(box: Box, left: float, right: float, y: float) -> str:
    width = max(right - left, 0.6)
    tip = f"{box.name}\n{box.phase}, {milliseconds((box.end - box.start) / 1e3)}"
    if box.count > 1:
        tip = f"{box.count} x {box.phase}, {milliseconds((box.end - box.start) / 1e3)}"
    if box.layer is not None:
        tip += f", layer {box.layer}"
    if box.bytes:
        tip += f", {box.bytes / 1e6:.3g} MB"
    return _rectangle(box.phase, left, y, width, _LANE - 8, tip)


def _runs(boxes: list[Box], gap: float) -> list[tuple[str, int, int]]:
    """Neighbours of one phase without a visible gap, which share a label."""
    runs: list[tuple[str, int, int]] = []
    for box in boxes:
        if runs and runs[-1][0] == box.phase and box.start - runs[-1][2] < gap:
            runs[-1] = (box.phase, runs[-1][1], max(runs[-1][2], box.end))
        else:
            runs.append((box.phase, box.start, box.end))
    return runs


def _rectangle(
    phase: str, x: float, y: float, width: float, height: float, tip: str, extra: str = ""
) -> str:
    return (
        f'<rect class="f-{phase} {extra}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" '
        f'height="{height}" data-tip="{escape(tip)}"/>'
    )


def _label(text: str, phase: str, x: float, width: float, y: float) -> str:
    """The text in its box, shortened to the first word, or nothing where that is too wide."""
    for words in (text, text.split(" ", 1)[-1]):
        if len(words) * _CHARACTER + 8 <= width:
            place = f'x="{x + width / 2:.1f}" y="{y + 19}"'
            return f'<text class="in t-{phase}" {place}>{escape(words)}</text>'
    return ""


def _facts(bar: Bar) -> str:
    facts = [milliseconds(bar.busy_us), f"{share(bar.hidden_pct)} hidden"]
    if bar.hidden_pct is None:
        facts = [milliseconds(bar.busy_us), share(None)]
    if bar.bytes:
        facts.append(f"{bar.bytes / 1e6:.3g} MB")
    if bar.gb_per_s:
        facts.append(f"{bar.gb_per_s:.3g} GB/s")
    return ", ".join(facts)


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def _time_axis(picture: LanePicture, y: float) -> str:
    """Ticks at round times since the start."""
    length = picture.end - picture.start
    step = _round_step(length / 8)
    scale = (WIDTH - _LEFT - 10) / max(length, 1)
    marks = []
    for i in range(int(length / step) + 1):
        at = _LEFT + i * step * scale
        if at > WIDTH - 40:
            break
        text = milliseconds(i * step / 1e3) if i else "0"
        marks.append(
            f'<line class="tick-mark" x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + 5}"/>'
        )
        marks.append(f'<text class="tick" x="{at + 2:.1f}" y="{y + 18}">{text}</text>')
    return "".join(marks)


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5, 10, ... that is not smaller."""
    power = 1.0
    while power * 10 <= rough:
        power *= 10
    return next((power * m for m in (1, 2, 5) if power * m >= rough), power * 10)
