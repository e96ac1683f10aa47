"""Line charts as SVG: axes with ticks, labels and units, and a legend."""

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 820, 460, 64, 210, 34, 52
_COLOURS = (
    "#d62728",
    "#1f77b4",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#8c564b",
    "#17becf",
    "#7f7f7f",
    "#bcbd22",
    "#e377c2",
)


def line_chart(
    title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]], log_x: bool = True
) -> str:
    """One SVG document; the first line is drawn thicker."""
    points = [point for line in lines.values() for point in line]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    high_y = max(y for _, y in points) * 1.05 or 1.0

    def x_at(x: float) -> float:
        scale = math.log if log_x else float
        share = (scale(x) - scale(low_x)) / ((scale(high_x) - scale(low_x)) or 1)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_at(y: float) -> float:
        return _HEIGHT - _BOTTOM - y / high_y * (_HEIGHT - _TOP - _BOTTOM)

    def text(x: float, y: float, content: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(content)}</text>'

    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        text((_LEFT + right) / 2, 20, title, more='font-weight="bold"'),
        f'<path d="M{_LEFT},{_TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
        text((_LEFT + right) / 2, _HEIGHT - 12, x_label),
        text(16, (_TOP + bottom) / 2, y_label, more=f'transform="rotate(-90 16 {(_TOP + bottom) / 2:.1f})"'),
    ]
    for x in sorted({x for x, _ in points}):
        drawn.append(text(x_at(x), bottom + 18, f"{x:,.6g}"))
        drawn.append(f'<path d="M{x_at(x):.1f},{bottom}v5" stroke="black"/>')
    for step in range(6):
        y = high_y * step / 5
        drawn.append(text(_LEFT - 8, y_at(y) + 4, f"{y:.0f}", "end"))
        drawn.append(f'<path d="M{_LEFT},{y_at(y):.1f}H{right}" stroke="#ddd"/>')
    for number, (name, line) in enumerate(lines.items()):
        dashes = "5 3" if number >= len(_COLOURS) else "none"  # colours come again
        colour, width = _COLOURS[number % len(_COLOURS)], 3 if number == 0 else 1.3
        pen = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"'
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line)
        drawn.append(f'<polyline points="{path}" {pen}/>')
        y = _TOP + 10 + 18 * number
        drawn.append(f'<path d="M{right + 12},{y}h22" {pen}/>')
        drawn.append(text(right + 40, y + 4, name, "start"))
    return "\n".join([*drawn, "</svg>", ""])
