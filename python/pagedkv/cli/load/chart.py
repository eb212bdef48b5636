"""Panels of lines and dots as one SVG file, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 380, 250  # of a panel, with its margins
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 24, 46, 42
_HEAD = 56
_COLOURS = ("#2563eb", "#d97706")
_INK, _PALE, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
_MAX_POINTS = 500


@dataclass(frozen=True, slots=True)
class Series:
    """points: (x, y), at least 0, x ascending for lines. is_dots: no line between them."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dots: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """Series over the same axes; both begin at 0."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def render(title: str, subtitle: str, panels: Sequence[Panel], *, num_columns: int = 3) -> str:
    """An SVG document, panels row by row."""
    num_rows = math.ceil(len(panels) / num_columns)
    width, height = num_columns * _WIDTH, _HEAD + num_rows * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 26, title, size=17, weight=600),
        _text(_LEFT, 45, subtitle, fill=_PALE, size=12),
    ]
    for i, panel in enumerate(panels):
        x, y = i % num_columns * _WIDTH, _HEAD + i // num_columns * _HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def ticks(most: float) -> list[float]:
    """From 0 to at least most in at most six steps of 1, 2 or 5 times a power of ten.

    Example: ticks(7) -> [0, 2, 4, 6, 8]
    """
    if not most > 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / 6))
    step = next(power * one for one in (1, 2, 5, 10, 20) if power * one * 6 >= most * (1 - 1e-9))
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Evenly chosen ones, both ends among them, where there are more than a chart can show."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    last = len(points) - 1
    return [points[round(i * last / (_MAX_POINTS - 1))] for i in range(_MAX_POINTS)]


def _panel(panel: Panel) -> str:
    points = [point for series in panel.series for point in series.points]
    x_ticks = ticks(max((x for x, _ in points), default=0.0))
    y_ticks = ticks(max((y for _, y in points), default=0.0))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place_x(x: float) -> float:
        return _LEFT + x / x_ticks[-1] * (right - _LEFT)

    def place_y(y: float) -> float:
        return bottom - y / y_ticks[-1] * (bottom - _TOP)

    parts = [_text(_LEFT, 18, panel.title, size=13, weight=600)]
    for y in y_ticks:
        at = place_y(y)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="{_GRID}"/>')
        parts.append(_text(_LEFT - 6, at + 4, f"{y:g}", anchor="end", fill=_PALE))
    for x in x_ticks:
        parts.append(_text(place_x(x), bottom + 15, f"{x:g}", anchor="middle", fill=_PALE))
    parts.append(f'<path d="M{_LEFT} {bottom}H{right}" stroke="{_PALE}"/>')
    parts.append(_text((_LEFT + right) / 2, bottom + 32, panel.x_label, anchor="middle"))
    parts.append(_text(_LEFT, _TOP - 9, panel.y_label, fill=_PALE))
    for i, series in enumerate(panel.series):
        colour = _COLOURS[i % len(_COLOURS)]
        placed = [(place_x(x), place_y(y)) for x, y in thinned(series.points)]
        if series.is_dots:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}" fill-opacity="0.6"/>'
                for x, y in placed
            ]
        elif placed:
            line = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
            dashes = ' stroke-dasharray="5 3"' if i else ""  # what lies below shows through
            drawn = f'fill="none" stroke="{colour}" stroke-width="2"{dashes}'
            parts.append(f'<path d="M{line}" {drawn}/>')
        if len(panel.series) > 1:
            at = right - 120 * (len(panel.series) - i)
            parts.append(f'<rect x="{at}" y="{_TOP - 17}" width="12" height="4" fill="{colour}"/>')
            parts.append(_text(at + 17, _TOP - 10, series.name))
    return "".join(parts)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    fill: str = _INK,
    size: int = 11,
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" '
        f'font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
    )
