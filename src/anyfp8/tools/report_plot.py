"""A panel → inline SVG: µs (or share of the floor) against M, both readable without colour.

Each contender has a colour, a dash and a marker of its own; styles are classes that the page
defines, so that one drawing serves a light and a dark screen and paper. Markers of a contender are
one path, which keeps a page small. Coordinates are affine in log2 M and in log10 µs (or the share).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from anyfp8.tools.report import BESIDE, OURS, Panel

WIDTH, HEIGHT = 470, 290
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 22, 58
# of the strip with the chosen backend
STRIP = 15

Points = Sequence[tuple[float, float]]


def style_of(panel: Panel, name: str) -> str:
    """The classes of a contender: colour and marker by its place, dash by its role."""
    names = panel.names
    role = panel.role(name)
    if role == BESIDE:
        index = [n for n in names if panel.role(n) == BESIDE].index(name)
        return f"beside m{index + 3}"
    place = names.index(name)
    kind = "own" if role == OURS else "peer"
    return f"{kind} c{place % 8} m{place % 8}"


def time_plot(panel: Panel) -> str:
    """µs against x, both logarithmic, with the floor; "" where nothing is timed."""
    times = {name: _points(panel, name, lambda e: e.us) for name in panel.names}
    times = {name: points for name, points in times.items() if points}
    floor = [(float(c.x), c.floor_us) for c in panel.cells if c.floor_us]
    values = [y for points in (*times.values(), floor) for _, y in points]
    if not values:
        return ""
    low, high = min(values) / 1.12, max(values) * 1.12
    scale = _Scale(panel, math.log10(low), math.log10(high))
    ticks = [(math.log10(t), f"{t:g}") for t in _decades(low, high)]
    described = f"µs against {panel.x_label}, {panel.title}"
    return _svg(panel, scale, ticks, "µs", described, times, floor, math.log10)


def share_plot(panel: Panel) -> str:
    """Share of the floor against x; "" where there is no floor."""
    shares = {name: _points(panel, name, lambda e: e.share) for name in panel.names}
    shares = {name: points for name, points in shares.items() if points}
    if not shares:
        return ""
    top = max([1.0, *(y for points in shares.values() for _, y in points)])
    scale = _Scale(panel, 0.0, top * 1.04)
    ticks = [(t / 5, f"{t / 5:.1f}") for t in range(int(top * 5) + 1)]
    floor = [(float(c.x), 1.0) for c in panel.cells if c.floor_us]
    described = f"share of the {panel.floor_label} against {panel.x_label}, {panel.title}"
    label = f"{panel.floor_label} / time"
    return _svg(panel, scale, ticks, label, described, shares, floor, float)


class _Scale:
    """Values to pixels."""

    def __init__(self, panel: Panel, low: float, high: float) -> None:
        xs = [math.log2(cell.x) for cell in panel.cells]
        pad = 0.35 if len(xs) > 1 else 1.0
        self.x_low, self.x_high = min(xs) - pad, max(xs) + pad
        self.low, self.high = low, high if high > low else low + 1

    def x(self, value: float) -> float:
        share = (math.log2(value) - self.x_low) / (self.x_high - self.x_low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _points(panel: Panel, name: str, of: Callable[..., float | None]) -> list[tuple[float, float]]:
    found = []
    for cell in panel.cells:
        entry = cell.entry(name)
        value = None if entry is None else of(entry)
        if value:
            found.append((float(cell.x), value))
    return found


def _decades(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … within the ends; every decade alone where that would be crowded."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    found = [step * 10.0**decade for decade in range(first, last + 1) for step in steps]
    return [tick for tick in found if low <= tick <= high]


def _svg(
    panel: Panel,
    scale: _Scale,
    ticks: Sequence[tuple[float, str]],
    label: str,
    described: str,
    series: dict[str, list[tuple[float, float]]],
    floor: Points,
    transform: Callable[[float], float],
) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(described)}; the figures are in the table below" '
        f'data-x="{scale.x_low:.6g} {scale.x_high:.6g}" data-y="{scale.low:.8g} {scale.high:.8g}">'
    ]
    for value, text in ticks:
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y + 3.5:.1f}">{text}</text>')
    last = -math.inf
    for cell in panel.cells:
        x = scale.x(cell.x)
        if x - last > 26:
            last = x
            parts.append(
                f'<text class="tick mid" x="{x:.1f}" y="{bottom + 14}">{_short(cell.x)}</text>'
            )
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v3"/>')
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>')
    parts.append(f'<text class="label" x="2" y="11">{escape(label)}</text>')
    parts.append(f'<text class="label end" x="{right}" y="{bottom + 26}">{panel.x_label}</text>')
    if len(floor) > 1:
        d = _line([(scale.x(x), scale.y(transform(y))) for x, y in floor])
        parts.append(f'<path class="floor" d="{d}"><title>{panel.floor_label}</title></path>')
    # ours on top
    for name in reversed(list(series)):
        points = [(scale.x(x), scale.y(transform(y))) for x, y in series[name]]
        style = style_of(panel, name)
        parts.append(f'<g class="{style}" data-name="{escape(name)}"><title>{escape(name)}</title>')
        parts.append(f'<path class="line" d="{_line(points)}"/>')
        parts.append(f'<path class="mark" d="{marks(points, _marker(style))}"/></g>')
    parts += _strip(panel, scale)
    return "".join([*parts, "</svg>"])


def _strip(panel: Panel, scale: _Scale) -> list[str]:
    """Which backend was chosen at each x, as a band under the axis."""
    chosen = [
        (cell.x, cell.first.backend)
        for cell in panel.cells
        if cell.first is not None and cell.first.backend
    ]
    if not chosen:
        return []
    parts = []
    names = list(dict.fromkeys(name for _, name in chosen))
    y, left = HEIGHT - STRIP - 8, float(LEFT)
    start = 0
    for i, (x, name) in enumerate(chosen):
        final = i + 1 == len(chosen)
        if not final and chosen[i + 1][1] == name:
            continue
        right = WIDTH - RIGHT if final else (scale.x(x) + scale.x(chosen[i + 1][0])) / 2
        span = f"{panel.x_label} {chosen[start][0]} to {x}: {name}"
        parts.append(
            f'<rect class="band b{names.index(name) % 4}" x="{left:.1f}" y="{y}" '
            f'width="{right - left:.1f}" height="{STRIP}"><title>{escape(span)}</title></rect>'
        )
        if right - left > 5.6 * len(name):
            middle = (left + right) / 2
            parts.append(
                f'<text class="tick mid" x="{middle:.1f}" y="{y + 11}">{escape(name)}</text>'
            )
        left, start = right, i + 1
    return parts


def _short(x: int) -> str:
    return f"{x // 1024}k" if x >= 1024 and x % 1024 == 0 else str(x)


def _line(points: Points) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _marker(style: str) -> int:
    return int(style.rsplit("m", 1)[1])


def marks(points: Points, kind: int) -> str:
    """Markers at points as one path: circle, square, diamond, triangles, cross, plus, bar."""
    shapes = (
        "m-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0z",
        "m-3-3h6v6h-6z",
        "m0-4l4 4l-4 4l-4-4z",
        "m0-4l3.7 6.6h-7.4z",
        "m0 4l3.7-6.6h-7.4z",
        "m-3-3l6 6m0-6l-6 6",
        "m-3.6 0h7.2m-3.6-3.6v7.2",
        "m-3.6 0h7.2",
    )
    return "".join(f"M{x:.1f} {y:.1f}{shapes[kind % len(shapes)]}" for x, y in points)


def swatch(style: str) -> str:
    """A contender's line and marker, for the legend."""
    mark = marks([(17, 7)], _marker(style))
    return (
        f'<svg class="swatch" viewBox="0 0 34 14" aria-hidden="true"><g class="{style}">'
        f'<path class="line" d="M1 7H33"/><path class="mark" d="{mark}"/></g></svg>'
    )
