"""Colours and patterns of the phases: light, dark, and tellable apart in greyscale.

The model is plain, in blues and grey; overhead is patterned, in warm and strong colours. Each pair
is (light theme, dark theme).
"""

from __future__ import annotations

COLOURS = {
    "attention": ("#1f5fa8", "#5b9be6"),
    "linear": ("#86b6e8", "#2f5f96"),
    "other": ("#c9d3dd", "#56616d"),
    "clustering": ("#e8870e", "#f5a13c"),
    "selection": ("#7b3fb5", "#b98af0"),
    "recall": ("#c2185b", "#f06a9b"),
    "offload": ("#12876f", "#3cc2a5"),
    "communication": ("#7a5230", "#b98d66"),
    "memory": ("#b5a642", "#d8cb72"),
    "idle": ("#f1f3f5", "#22272d"),
}

# How a phase is drawn beside its colour: strokes in a 6 x 6 tile (SVG), and matplotlib's hatch.
PATTERNS = {
    "clustering": "M0,6 L6,0 M-1,1 L1,-1 M5,7 L7,5",
    "selection": "M1.5,3 L4.5,3 M3,1.5 L3,4.5",
    "recall": "M0,0 L6,6 M5,-1 L7,1 M-1,5 L1,7",
    "offload": "M0,3 L6,3",
    "communication": "M3,0 L3,6",
    "memory": "M0,0 L6,6 M6,0 L0,6",
}
HATCHES = {
    "clustering": "///",
    "selection": "++",
    "recall": "\\\\\\",
    "offload": "---",
    "communication": "||",
    "memory": "xx",
}
EXPOSED = ("#d32f2f", "#ff6b6b")


def stylesheet() -> str:
    """CSS variables of both themes, and the classes of boxes and labels of each phase."""
    light, dark = (_variables(0) + _LIGHT, _variables(1) + _DARK)
    classes = "".join(
        f".f-{phase}{{fill:{f'url(#p-{phase})' if phase in PATTERNS else f'var(--{phase})'}}}"
        f".t-{phase}{{fill:var(--ink-{phase});stroke:var(--{phase})}}"
        for phase in COLOURS
    )
    return (
        f":root{{{light}}}"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}{classes}"
    )


def pattern_definitions() -> str:
    """The SVG patterns that the fill classes refer to; one a page."""
    tiles = "".join(
        f'<pattern id="p-{phase}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" style="fill:var(--{phase})"/>'
        f'<path d="{path}" style="stroke:var(--hatch)" stroke-width="1"/></pattern>'
        for phase, path in PATTERNS.items()
    )
    return f'<svg width="0" height="0" style="position:absolute"><defs>{tiles}</defs></svg>'


def ink(colour: str) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#10151b" if luminance > 0.22 else "#ffffff"


def _variables(theme: int) -> str:
    pairs = [(phase, pair[theme]) for phase, pair in COLOURS.items()]
    colours = "".join(f"--{phase}:{value};--ink-{phase}:{ink(value)};" for phase, value in pairs)
    return f"{colours}--exposed:{EXPOSED[theme]};"


_LIGHT = (
    "--page:#fff;--text:#1b2129;--muted:#5d6875;--line:#d9dee4;--panel:#f6f8fa;"
    "--hatch:#fff9;--shade:.17"
)
_DARK = (
    "--page:#14181d;--text:#e7ebf0;--muted:#9aa6b2;--line:#343c45;--panel:#1c2127;"
    "--hatch:#0008;--shade:.33"
)
