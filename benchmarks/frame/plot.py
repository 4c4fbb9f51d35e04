"""A table as an SVG picture: bars beside each other, or lines by size on two logarithmic axes.

Drawn by hand: a picture of a dozen points needs no library, and one file that any browser shows is all that is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .report import Row, TableData, number

WIDTH, LEFT, RIGHT, TOP = 760, 290, 110, 46
_BAR = 26
_HEIGHT = 380
_COLOURS = ("#2563eb", "#c2410c", "#15803d", "#7c3aed", "#b91c1c", "#0e7490", "#a16207", "#be185d")
_STYLE = """
svg { font: 13px system-ui, sans-serif; background: #fff; color: #1f2937 }
text { fill: currentColor } .dim { opacity: .7 } .grid { stroke: currentColor; opacity: .15 }
@media (prefers-color-scheme: dark) { svg { background: #111827; color: #e5e7eb } }
"""


def plot(table: TableData) -> str:
    """The picture of a table."""
    return _lines(table) if table.axis and any(row.size for row in table.rows) else _bars(table)


def _frame(title: str, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    named = f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    return "\n".join([head, named, f'<text x="12" y="24" font-weight="600">{escape(title)}</text>', *parts, "</svg>\n"])


def _bars(table: TableData) -> str:
    most = max((row.most for row in table.rows), default=0.0) or 1.0
    room = WIDTH - LEFT - RIGHT
    parts = []
    for place, row in enumerate(table.rows):
        y = TOP + place * _BAR
        width, low, high = (room * value / most for value in (row.median, row.least, row.most))
        told = f"{number(row.median)} {table.unit}" + (f" ({row.ratio:.2f} x)" if row.ratio else "")
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(row.label)}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="16" rx="2" fill="{_COLOURS[bool(row.ratio) - 1]}"/>',
            f'<path d="M{LEFT + low:.1f} {y + 11}H{LEFT + high:.1f}" stroke="currentColor"/>',
            f'<text x="{LEFT + max(width, high) + 6:.1f}" y="{y + 15}" class="dim">{escape(told)}</text>',
        ]
    return _frame(table.title, TOP + len(table.rows) * _BAR + 14, parts)


def _lines(table: TableData) -> str:
    rows = [row for row in table.rows if row.size > 0 and row.median > 0]
    left, bottom = 70, _HEIGHT - 50
    across = _scale([row.size for row in rows], left, WIDTH - 220)
    up = _scale([row.median for row in rows], bottom, TOP + 10)
    parts = [f'<text x="{left}" y="{_HEIGHT - 12}" class="dim">{escape(table.axis)}</text>']
    parts.append(f'<text x="12" y="{TOP}" class="dim">{escape(table.unit)}</text>')
    for size in sorted({row.size for row in rows}):
        x = across(size)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" class="dim">{number(size)}</text>')
    for power in _powers([row.median for row in rows]):
        y = up(power)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH - 220}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" class="dim">{number(power)}</text>')
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(row.series, []).append(row)
    for place, (name, points) in enumerate(series.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        ordered = sorted(points, key=lambda row: row.size)
        path = " ".join(f"{across(row.size):.1f},{up(row.median):.1f}" for row in ordered)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(r.size):.1f}" cy="{up(r.median):.1f}" r="3" fill="{colour}"/>' for r in ordered]
        y = TOP + 14 + place * 20
        parts.append(f'<rect x="{WIDTH - 205}" y="{y - 9}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - 187}" y="{y - 3}">{escape(name)}</text>')
    return _frame(table.title, _HEIGHT, parts)


class _scale:
    """A logarithmic axis."""

    def __init__(self, values: Sequence[float], low: float, high: float) -> None:
        self._first, last = math.log(min(values)), math.log(max(values))
        self._low = low
        self._each = (high - low) / (last - self._first) if last > self._first else 0.0

    def __call__(self, value: float) -> float:
        return self._low + (math.log(value) - self._first) * self._each


def _powers(values: Sequence[float]) -> list[float]:
    first, last = math.ceil(math.log10(min(values))), math.floor(math.log10(max(values)))
    return [10.0**power for power in range(first, last + 1)]
