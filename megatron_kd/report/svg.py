# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG text, to stand inside an HTML page: lines over steps, and stacked bars.

In: names and numbers. Out: an <svg> element with a title for those who cannot see it, and a legend. Text from
outside is escaped. Costs milliseconds; needs nothing.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = (
    *("#2a6fbb", "#e07b39", "#3c8d5a", "#8e5ea2", "#b3261e"),
    *("#64748b", "#b08900", "#0e9aa7", "#db6fa5", "#5b4636"),
)
DASHES = ("", "6 3", "2 2", "8 3 2 3")
"""Of lines, once all colours are used up."""
WIDTH, HEIGHT = 520, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 34
_MOST_POINTS = 600


def line_chart(title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str = "step") -> str:
    """Lines of (x, y) points, one each name; what is not finite leaves a gap. Long series are thinned evenly.

    A name without points has no line and no place in the legend, but its colour is kept for it, so that charts
    agree. Empty text if there is nothing to draw.
    """
    points = [(x, y) for line in series.values() for x, y in line if math.isfinite(y)]
    if not points:
        return ""
    xs, ys = zip(*points, strict=True)
    x_axis, y_axis = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT), _Axis(min(ys), max(ys), HEIGHT - _BOTTOM, _TOP)
    parts = [*_frame(x_axis, y_axis, x_label)]
    for number, line in enumerate(series.values()):
        if not line:
            continue
        thinned = [*line[: -1 : max(1, len(line) // _MOST_POINTS)], line[-1]]
        path = _path([(x_axis.at(x), y_axis.at(y)) for x, y in thinned])
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        parts.append(
            f'<path d="{path}" fill="none" stroke="{colour(number)}" stroke-width="1.8" stroke-linecap="round" '
            f'stroke-dasharray="{dash}"/>'
        )
    return _svg(title, HEIGHT, parts) + legend({name: at for at, name in enumerate(series) if series[name]})


def stacked_bars(
    title: str,
    bars: Mapping[str, Mapping[str, float]],
    *,
    labels: Mapping[str, str],
    limit: float | None = None,
    limit_label: str = "",
) -> str:
    """Horizontal bars, one each name, made of parts that are at least 0.

    Args:
        title: Read aloud.
        bars: By name of the bar, its parts by name.
        labels: By name of the bar, what stands at its end.
        limit: Where a dashed line is drawn.
        limit_label: What it says.
    """
    totals = [sum(parts.values()) for parts in bars.values()]
    longest = max([*totals, limit or 0, 1e-30])
    left, step, right = 130, 30, 125
    height = 26 + step * len(bars)
    scale = (WIDTH + 160 - left - right) / longest
    names = list(dict.fromkeys(part for parts in bars.values() for part in parts))
    drawn = []
    if limit:
        x = left + limit * scale
        drawn.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{height}" stroke="#1f2933" stroke-dasharray="4 3"/>'
            f'<text x="{x:.1f}" y="11" text-anchor="middle">{escape(limit_label)}</text>'
        )
    for row, (name, parts) in enumerate(bars.items()):
        x, y = float(left), 20 + row * step
        drawn.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for part, value in parts.items():
            width = value * scale
            tip = escape(f"{name}: {part} {value:.4g}")
            fill = colour(names.index(part))
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" fill="{fill}"><title>{tip}</title></rect>'
            )
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{escape(labels[name])}</text>')
    return _svg(title, height, drawn, width=WIDTH + 160) + (
        legend({name: at for at, name in enumerate(names)}) if len(names) > 1 else ""
    )


def legend(names: Mapping[str, int]) -> str:
    """The names with the colours of their numbers, as a list that breaks over lines."""
    items = (
        f'<li><span class="swatch" style="background:{colour(number)}"></span>{escape(name)}</li>'
        for name, number in names.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def colour(number: int) -> str:
    """The colour of the n-th series."""
    return COLOURS[number % len(COLOURS)]


class _Axis:
    """Numbers to places on the page, with round ticks."""

    def __init__(self, low: float, high: float, start: float, stop: float):
        if low == high:
            room = abs(low) / 10 or 0.5
            low, high = low - room, high + room
        self.low, self.high, self.start, self.stop = low, high, start, stop

    def at(self, value: float) -> float:
        """Its place; not a number for what is not finite."""
        if not math.isfinite(value):
            return math.nan
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Three to six round numbers within."""
        raw = (self.high - self.low) / 4
        unit = 10 ** math.floor(math.log10(raw))
        step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step) + 1)]


def _frame(x_axis: _Axis, y_axis: _Axis, x_label: str) -> list[str]:
    parts = []
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in x_axis.ticks():
        x = x_axis.at(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle">{short(value)}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Moves where the pen was off the page, lines elsewhere; a line of no length shows a lone point."""
    words, down = [], False
    for x, y in points:
        if math.isnan(y):
            down = False
            continue
        words.append(f"L{x:.1f} {y:.1f}" if down else f"M{x:.1f} {y:.1f}h0")
        down = True
    return " ".join(words)


def _svg(title: str, height: int, parts: Sequence[str], width: int = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )


def short(value: float) -> str:
    """A tick's number: 0.25, 12, 3k, 1e+09."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.5g}"
