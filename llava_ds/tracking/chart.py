"""Draw charts as inline SVG, without scripts, fonts or other files."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llava_ds.tracking.series import thinned

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 34
LOG_FROM = 12.0  # minimum ratio of the largest to the smallest value for a log scale


@dataclass(frozen=True)
class Series:
    """A curve.

    colour: index 0 to 7 of the page's colours; faint: True to draw it pale; dots: True to draw
    its points as well.
    """

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    colour: int = 0
    faint: bool = False
    dots: bool = False


def short(value: float) -> str:
    """Format a number in few characters: 12,345, 1.2M, 2e-5, 0.0123."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if size >= scale:
            return f"{value / scale:.3g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.3g}"


def is_far_apart(values: Sequence[float]) -> bool:
    """Return True if values need a logarithmic scale. Non-finite values are ignored."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= LOG_FROM


def line_chart(
    title: str,
    series: Sequence[Series],
    log: bool = True,
    from_zero: bool = False,
) -> str:
    """Return a figure that plots each series over the optimizer steps, or says "No values.".

    log: True to use a logarithmic scale if the values are far apart; from_zero: True to begin the vertical axis at
    zero.
    """
    drawn = [one for one in series if any(map(math.isfinite, one.values))]
    if not drawn:
        return f"<figure>{_caption(title, series)}<p class=none>No values.</p></figure>"
    values = [value for one in drawn for value in one.values if math.isfinite(value)]
    first, last = min(one.steps[0] for one in drawn), max(one.steps[-1] for one in drawn)
    first = 0 if 20 * first < last else first
    low, high = 0.0 if from_zero else min(values), max(values)
    if high - low <= 1e-6 * abs(high):  # rounding errors in the running mean of a constant
        high = low
    is_log = log and is_far_apart([low, high])
    ticks = _log_ticks(low, high) if is_log else _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    if low == high:
        low, high = (low * 0.9, high * 1.1) if low > 0 else (low - 1, high + 1)
    scale = math.log if is_log else float

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((step - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        part = (scale(value) - scale(low)) / (scale(high) - scale(low))
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part

    parts = [_grid(ticks, y), *_steps_axis(first, last, x), *(_curve(one, x, y) for one in drawn)]
    told = f"{title}, steps {first:,} to {last:,}, {short(min(values))} to {short(max(values))}"
    told += ", log scale" if is_log else ""
    return f"<figure>{_caption(title, series, is_log)}{_svg(told, parts)}</figure>"


def bar_chart(title: str, edges: Sequence[float], counts: Sequence[int], unit: str) -> str:
    """Return a histogram. edges: bounds of the bars, one more than counts; unit: label of the horizontal axis."""
    if not counts or len(edges) != len(counts) + 1 or not max(counts) > 0:
        return f"<figure><figcaption>{html.escape(title)}</figcaption><p class=none>No values.</p></figure>"
    ticks = [tick for tick in _ticks(0, max(counts)) if tick == int(tick)]
    high = max(ticks[-1], *counts)
    inner = WIDTH - LEFT - RIGHT

    def x(edge: float) -> float:
        return LEFT + inner * (edge - edges[0]) / (edges[-1] - edges[0])

    def y(count: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * count / high

    parts = [_grid(ticks, y)]
    for start, end, count in zip(edges, edges[1:], counts):
        told = f"{start:,} to {end:,} {unit}: {count:,}"
        wide = max(0.5, x(end) - x(start) - 1)
        parts.append(
            f'<rect class="bar" x="{x(start) + 0.5:.1f}" y="{y(count):.1f}" width="{wide:.1f}" '
            f'height="{HEIGHT - BOTTOM - y(count):.1f}"><title>{html.escape(told)}</title></rect>'
        )
    for tick in _ticks(edges[0], edges[-1]):
        if edges[0] <= tick <= edges[-1]:
            parts.append(_label(x(tick), HEIGHT - BOTTOM + 15, short(tick), "middle"))
    parts.append(_label(LEFT + inner / 2, HEIGHT - 4, unit, "middle"))
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{_svg(title, parts)}</figure>"


def _svg(told: str, parts: list[str]) -> str:
    opening = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(told)}">'
    return f"{opening}{''.join(parts)}</svg>"


def _caption(title: str, series: Sequence[Series], is_log: bool = False) -> str:
    """Return the caption: the title, a note if the scale is logarithmic, and a legend of the curves."""
    keys = [
        f'<span class="key s{one.colour}{" thin" if one.faint else ""}">{html.escape(one.label)}</span>'
        for one in series
        if one.label
    ]
    scale = " <small>log scale</small>" if is_log else ""
    legend = f"<span class=keys>{''.join(keys)}</span>" if keys else ""
    return f"<figcaption><span>{html.escape(title)}{scale}</span>{legend}</figcaption>"


def _grid(ticks: list[float], y: Callable[[float], float]) -> str:
    lines = "".join(f"M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" for tick in ticks)
    labels = "".join(_label(LEFT - 6, y(tick) + 3.5, short(tick), "end") for tick in ticks)
    return f'<path class="grid" d="{lines}"/>{labels}'


def _steps_axis(first: int, last: int, x: Callable[[float], float]) -> list[str]:
    ticks = [tick for tick in _ticks(first, last) if first <= tick <= last and tick == int(tick)] or [first]
    labels = [_label(x(tick), HEIGHT - BOTTOM + 15, f"{int(tick):,}", "middle") for tick in ticks]
    return [*labels, _label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "optimizer step", "middle")]


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _curve(one: Series, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    steps, values = thinned(one.steps, one.values, most=600)
    path, pen_down, points = [], False, []
    for step, value in zip(steps, values):
        if not math.isfinite(value):
            pen_down = False
            continue
        path.append(f"{'L' if pen_down else 'M'}{x(step):.1f} {y(value):.1f}")
        points.append(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5"/>')
        pen_down = True
    dots = "".join(points) if one.dots or len(points) == 1 else ""
    return f'<g class="curve s{one.colour}{" faint" if one.faint else ""}"><path d="{"".join(path)}"/>{dots}</g>'


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round values that span `low` to `high`."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    width = next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= raw * 0.999)
    start, end = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return [round(i * width, 12) if width > 1e-6 else i * width for i in range(start, end + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return ticks at 1, 2 and 5 times powers of ten that enclose low to high; if many, only powers within."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    kept = [tick for tick in ticks if below <= tick <= above]
    if len(kept) <= 8:
        return kept
    kept = [
        10.0**power for power in powers if low <= 10.0**power <= high
    ]  # at least two remain, because there were many
    return kept[:: math.ceil(len(kept) / 7)]
