"""Where everything stands in the report's two pictures: documents in, coordinates out.

Coordinates are the units of an SVG ``viewBox``; the template turns them into elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurmspot.report.document import GROUPS, Curve, Document, Lane
from slurmspot.report.table import duration

WIDTH = 960.0
_LEFT, _RIGHT = 4.0, 4.0
_LANE = 76.0
_LABEL, _INJECTION, _NOTICE, _BAR, _BAR_HEIGHT = 12.0, 27.0, 36.0, 38.0, 22.0
_LEAST = 0.75  # a phase narrower than this is drawn this wide
_MOST_LANES = 60
_MOST_BREAKS = 40  # more of them are short ticks, so that the curves stay to be seen

_GROUP_OF = {phase: group for group, phases in GROUPS.items() for phase in phases}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle; ``group`` is a key of :data:`GROUPS`."""

    x: float
    y: float
    width: float
    height: float
    group: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A mark at a point."""

    x: float
    y: float
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
class TimelinePicture:
    """All lanes over one axis of time."""

    width: float
    height: float
    labels: tuple[Label, ...]
    bars: tuple[Bar, ...]
    signs: tuple[Sign, ...]
    ticks: tuple[Label, ...]
    groups: tuple[str, ...]
    left_out: int


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
    scale = (WIDTH - _LEFT - _RIGHT) / longest_s
    height = _LANE * len(lanes) + 30.0
    bars = [bar for row, lane in enumerate(lanes) for bar in _bars(lane, row * _LANE, scale)]
    return TimelinePicture(
        width=WIDTH,
        height=height,
        labels=tuple(
            Label(x=_LEFT, y=row * _LANE + _LABEL, text=lane.label)
            for row, lane in enumerate(lanes)
        ),
        bars=tuple(bars),
        signs=tuple(
            sign for row, lane in enumerate(lanes) for sign in _signs(lane, row * _LANE, scale)
        ),
        ticks=tuple(
            _tick(round(_LEFT + at_s * scale, 2), height - 8.0, _clock(at_s))
            for at_s in _time_ticks(longest_s)
        ),
        groups=tuple(group for group in GROUPS if any(bar.group == group for bar in bars)),
        left_out=len(document.lanes) - len(lanes),
    )


def _tick(x: float, y: float, text: str) -> Label:
    """A label under an axis; at the edges it stays inside the picture."""
    near = 24.0
    anchor = "start" if x < near else "end" if x > WIDTH - near else "middle"
    return Label(x=x, y=y, text=text, anchor=anchor)


def _bars(lane: Lane, top: float, scale: float) -> list[Bar]:
    return [
        Bar(
            x=round(_LEFT + span.start_s * scale, 2),
            y=top + _BAR,
            width=round(max(_LEAST, (span.end_s - span.start_s) * scale), 2),
            height=_BAR_HEIGHT,
            group=_GROUP_OF.get(span.name, "training"),
            text=span.text,
        )
        for span in lane.spans
    ]


def _signs(lane: Lane, top: float, scale: float) -> list[Sign]:
    """Marks of a lane, leaving out those that would stand on one another."""
    end = max((span.end_s for span in lane.spans), default=0.0)
    rows = {"injection": _INJECTION, "notice": _NOTICE, "commit": _BAR + _BAR_HEIGHT}
    signs: list[Sign] = []
    last: dict[str, float] = {}
    for mark in sorted(lane.marks, key=lambda mark: mark.at_s):
        x = round(_LEFT + min(mark.at_s, end) * scale, 2)
        if x - last.get(mark.kind, -math.inf) >= 2.0:
            last[mark.kind] = x
            signs.append(Sign(x=x, y=top + rows[mark.kind], kind=mark.kind, text=mark.text))
    return signs


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
            Sign(x=x(step), y=top, kind="break", text=f"{kind.replace('_', ' ')} at step {step}")
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


def _time_ticks(longest_s: float) -> list[float]:
    """Round times from 0 on, at most about eight."""
    units = [1, 2, 5, 10, 15, 30, *(60 * n for n in (1, 2, 5, 10, 15, 30))]
    units += [3600 * n for n in (1, 2, 3, 6, 12, 24, 48, 96, 168)]
    step = next((unit for unit in units if unit * 8 >= longest_s), longest_s / 8)
    return [step * number for number in range(int(longest_s / step) + 1)]


def _clock(seconds: float) -> str:
    if seconds == 0:
        return "0"
    return duration(seconds).removesuffix(" 00 s").removesuffix(" 00 min").removesuffix(" 00 h")
