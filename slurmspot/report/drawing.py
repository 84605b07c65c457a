"""Where everything stands in the report's pictures: documents in, coordinates out.

Coordinates are the units of an SVG ``viewBox``; the template turns them into elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from slurmspot.report.document import GROUPS, Curve, Document, Lane, Spread
from slurmspot.report.table import duration

WIDTH = 960.0
_LABEL_ROOM = 7.0  # per cent of the window: a label needs as much to the right of its tick
_LEAST = 0.07  # per cent: a phase narrower than this is drawn this wide
_ROUND = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 21_600, 43_200, 86_400, 172_800, 604_800),
)  # seconds

ZOOMS = (1, 4, 16, 64)
"""How many times the timeline can be widened."""

_MOST_LANES = 60
_MOST_BREAKS = 40  # more of them are short ticks, so that the curves stay to be seen

_GROUP_OF = {phase: group for group, phases in GROUPS.items() for phase in phases}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A phase, in per cent of the axis; ``group`` is a key of :data:`GROUPS`."""

    x: float
    width: float
    group: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A mark on a horizontal axis."""

    x: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A text, anchored at ``start``, ``middle`` or ``end``."""

    x: float
    y: float
    text: str
    anchor: str = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A lane: its bars, and its marks at per cents of the axis."""

    label: str
    bars: tuple[Bar, ...]
    signs: tuple[Sign, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A time on the axis, in per cent of it; seen once the picture is ``zoom`` times as wide."""

    x: float
    text: str
    zoom: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePicture:
    """All lanes over one axis of time."""

    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    groups: tuple[str, ...]
    kinds: frozenset[str]
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A bar of a histogram, with what it stands for."""

    x: float
    y: float
    width: float
    height: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadPicture:
    """A histogram over a logarithmic axis of time, and where its median is."""

    name: str
    summary: str
    width: float
    height: float
    bottom: float
    columns: tuple[Column, ...]
    median: Sign
    ticks: tuple[Label, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FallBar:
    """One bar of the way from nominal to effective saving; ``kind`` is ``end`` or ``loss``."""

    x: float
    y: float
    width: float
    kind: str
    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FallPicture:
    """The way from the nominal saving to the effective one, a bar a step."""

    width: float
    height: float
    zero: float
    bars: tuple[FallBar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve as the ``points`` of a polyline."""

    label: str
    points: str
    baseline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPicture:
    """Curves of loss over an axis of steps."""

    width: float
    height: float
    top: float
    bottom: float
    left: float
    right: float
    lines: tuple[Line, ...]
    breaks: tuple[Sign, ...]
    break_bottom: float
    x_ticks: tuple[Label, ...]
    y_ticks: tuple[Label, ...]


def timeline_picture(document: Document) -> TimelinePicture:
    """The lanes of ``document``; of more than :data:`_MOST_LANES` the first."""
    lanes = document.lanes[:_MOST_LANES]
    longest_s = max((span.end_s for lane in lanes for span in lane.spans), default=0.0) or 1.0
    rows = tuple(
        Row(label=lane.label, bars=_bars(lane, longest_s), signs=_signs(lane, longest_s))
        for lane in lanes
    )
    seen = {bar.group for row in rows for bar in row.bars}
    return TimelinePicture(
        rows=rows,
        ticks=tuple(_time_marks(longest_s)),
        groups=tuple(group for group in GROUPS if group in seen),
        kinds=frozenset(sign.kind for row in rows for sign in row.signs),
        left_out=len(document.lanes) - len(lanes),
    )


def _time_marks(longest_s: float) -> Iterator[Tick]:
    known: set[float] = set()
    for zoom in ZOOMS:
        for at_s in _time_ticks(longest_s / zoom, longest_s):
            x = round(100 * at_s / longest_s, 3)
            if at_s not in known and (100 - x) * zoom >= _LABEL_ROOM:
                known.add(at_s)
                yield Tick(x=x, text=_clock(at_s), zoom=zoom)


def _bars(lane: Lane, longest_s: float) -> tuple[Bar, ...]:
    return tuple(
        Bar(
            x=round(100 * span.start_s / longest_s, 3),
            width=round(max(_LEAST, 100 * (span.end_s - span.start_s) / longest_s), 3),
            group=_GROUP_OF.get(span.name, "training"),
            text=span.text,
        )
        for span in lane.spans
    )


def _signs(lane: Lane, longest_s: float) -> tuple[Sign, ...]:
    """Marks of a lane, leaving out those that would stand on one another at the widest."""
    end_s = max((span.end_s for span in lane.spans), default=0.0)
    signs: list[Sign] = []
    last: dict[str, float] = {}
    for mark in sorted(lane.marks, key=lambda mark: mark.at_s):
        x = round(100 * min(mark.at_s, end_s) / longest_s, 3)
        if x - last.get(mark.kind, -math.inf) >= _LEAST:
            last[mark.kind] = x
            signs.append(Sign(x=x, kind=mark.kind, text=mark.text))
    return tuple(signs)


def spread_pictures(document: Document) -> list[SpreadPicture]:
    """A histogram for each spread of ``document``."""
    return [_spread(spread) for spread in document.spreads]


def _spread(spread: Spread) -> SpreadPicture:
    width, bottom, top, bins = 460.0, 110.0, 14.0, 24
    least = 0.1  # seconds: what is shorter stands at the left edge
    values = [max(least, value) for value in spread.seconds]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1

    def x(seconds: float) -> float:
        return round((width - 8) * (math.log10(seconds) - low) / (high - low) + 4, 2)

    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(bins * (math.log10(value) - low) / (high - low)))] += 1
    edges = [10 ** (low + (high - low) * index / bins) for index in range(bins + 1)]
    columns = tuple(
        Column(
            x=x(since),
            y=round(bottom - (bottom - top) * count / max(counts), 2),
            width=round(max(1.0, x(until) - x(since) - 1), 2),
            height=round((bottom - top) * count / max(counts), 2),
            text=f"{count} from {duration(since)} to {duration(until)}",
        )
        for count, since, until in zip(counts, edges, edges[1:], strict=False)
        if count
    )
    middle = median(spread.seconds)
    ninth = sorted(spread.seconds)[math.ceil(0.9 * len(values)) - 1]
    summary = (
        f"median {duration(middle)}, nine in ten within {duration(ninth)}, "
        f"longest {duration(max(spread.seconds))}"
    )
    inside = [at_s for at_s in _ROUND if low <= math.log10(at_s) <= high]
    shown = inside[:: -(-len(inside) // 8) or 1]
    return SpreadPicture(
        name=spread.name,
        summary=summary,
        width=width,
        height=bottom + 22,
        bottom=bottom,
        columns=columns,
        median=Sign(x=x(max(least, middle)), kind="median", text=f"median {duration(middle)}"),
        ticks=tuple(_tick(x(at_s), bottom + 16, _clock(at_s), width) for at_s in shown),
    )


def fall_picture(document: Document) -> FallPicture | None:
    """The way from the nominal to the effective saving, or None if there is none to show."""
    if not document.falls:
        return None
    left, right, row = 170.0, WIDTH - 190.0, 26.0
    shares = [share for fall in document.falls for share in (fall.before, fall.after)]
    low, high = min(0.0, *shares), max(0.01, *shares)

    def x(share: float) -> float:
        return round(left + (right - left) * (share - low) / (high - low), 2)

    ends = (document.falls[0], document.falls[-1])
    return FallPicture(
        width=WIDTH,
        height=row * len(document.falls) + 4,
        zero=x(0.0),
        bars=tuple(
            FallBar(
                x=min(x(fall.before), x(fall.after)),
                y=number * row + 4,
                width=max(1.0, round(abs(x(fall.after) - x(fall.before)), 2)),
                kind="end" if fall in ends else "loss",
                name=fall.name,
                value=(f"{fall.after:.1%}" if fall in ends else f"{fall.after - fall.before:+z.1%}")
                + (f"  {fall.amount}" if fall.amount else ""),
            )
            for number, fall in enumerate(document.falls)
        ),
    )


def _tick(x: float, y: float, text: str, width: float = WIDTH) -> Label:
    """A label under an axis; at the edges it stays inside the picture."""
    near = 24.0
    anchor = "start" if x < near else "end" if x > width - near else "middle"
    return Label(x=x, y=y, text=text, anchor=anchor)


def loss_picture(document: Document) -> LossPicture | None:
    """The curves of ``document``, or None if no run logged a loss."""
    points = [point for curve in document.curves for point in curve.points]
    if not points:
        return None
    left, right, top, bottom, height = 56.0, WIDTH - 12.0, 12.0, 236.0, 276.0
    steps = max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    margin = (high - low or abs(high) or 1.0) * 0.06
    low, high = low - margin, high + margin

    def x(step: float) -> float:
        return round(left + (right - left) * step / (steps or 1), 2)

    def y(loss: float) -> float:
        return round(bottom - (bottom - top) * (loss - low) / (high - low), 2)

    return LossPicture(
        width=WIDTH,
        height=height,
        top=top,
        bottom=bottom,
        left=left,
        right=right,
        lines=tuple(_line(curve, x, y) for curve in _baseline_first(document.curves)),
        breaks=tuple(
            Sign(x=x(step), kind="break", text=f"{kind.replace('_', ' ')} at step {step}")
            for step, kind in document.breaks
            if step <= steps
        ),
        break_bottom=bottom if len(document.breaks) <= _MOST_BREAKS else top + 8.0,
        x_ticks=tuple(
            _tick(x(step), bottom + 18, f"{step:,.0f}")
            for step in _ticks(0, steps, 8)
            if step == round(step)
        ),
        y_ticks=tuple(
            Label(x=left - 8, y=y(loss), text=f"{loss:.4g}", anchor="end")
            for loss in _ticks(low, high, 5)
        ),
    )


def _baseline_first(curves: Sequence[Curve]) -> list[Curve]:
    return sorted(curves, key=lambda curve: not curve.baseline)


def _line(curve: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> Line:
    points = " ".join(f"{x(step)},{y(loss)}" for step, loss in curve.points)
    return Line(label=curve.label, points=points, baseline=curve.baseline)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most about ``most`` of them."""
    rough = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [step * number for number in range(first, math.floor(high / step) + 1)]


def _time_ticks(seen_s: float, longest_s: float) -> list[float]:
    """Round times from 0 to ``longest_s``, about eight in every ``seen_s``."""
    units = [1, 2, 5, 10, 15, 30, *(60 * n for n in (1, 2, 5, 10, 15, 30))]
    units += [3600 * n for n in (1, 2, 3, 6, 12, 24, 48, 96, 168)]
    step = next((unit for unit in units if unit * 8 >= seen_s), seen_s / 8)
    return [step * number for number in range(int(longest_s / step) + 1)]


def _clock(seconds: float) -> str:
    if seconds == 0:
        return "0"
    return duration(seconds).removesuffix(" 00 s").removesuffix(" 00 min").removesuffix(" 00 h")
