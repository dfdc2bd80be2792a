"""The ratios as a picture: `docs/benchmarks.svg`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from bench.result import Result

WIDTH, LABELS, ROW, TOP = 1000, 560, 22, 52
LEAST, MOST = 0.1, 30.0
GOOD, MISSED, PLAIN = "#2f7d5b", "#b3452c", "#7a8794"


def plot(results: Sequence[Result]) -> str:
    """Bars of every ratio, on a logarithmic scale; a tick where the goal is.

    Right is better: where a small ratio is wanted, its inverse is drawn.
    """
    shown = [result for result in results if result.ratio]
    height = TOP + ROW * len(shown) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LABELS}" y="18" fill="#333">ratio to the reference (right is better; '
        "the black mark is the goal)</text>",
        *_axis(height),
    ]
    for index, result in enumerate(shown):
        lines += _bar(result, TOP + ROW * index)
    return "\n".join([*lines, "</svg>", ""])


def _axis(height: int) -> Iterator[str]:
    for value in (0.1, 0.3, 1, 3, 10, 30):
        x = _x(value)
        strong = "#999" if value == 1 else "#e3e3e3"
        ends = f'y1="{TOP - 8}" y2="{height - 8}"'
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" {ends} stroke="{strong}"/>'
        yield f'<text x="{x:.1f}" y="{TOP - 14}" fill="#666" text-anchor="middle">{value:g}</text>'


def _bar(result: Result, top: int) -> Iterator[str]:
    assert result.ratio is not None
    inverse = result.at_most is not None
    value = 1 / result.ratio if inverse else result.ratio
    colour = PLAIN if result.wanted is None else GOOD if result.good else MISSED
    end = _x(value)
    what = result.what if len(result.what) < 88 else result.what[:86] + "…"
    yield (
        f'<text x="{LABELS - 10}" y="{top + 14}" fill="#222" text-anchor="end">'
        f"{escape(what)}</text>"
    )
    yield (
        f'<rect x="{LABELS}" y="{top + 3}" width="{end - LABELS:.1f}" height="{ROW - 7}" '
        f'fill="{colour}"/>'
    )
    if result.wanted is not None:
        goal = _x(1 / result.wanted if inverse else result.wanted)
        yield (
            f'<line x1="{goal:.1f}" y1="{top}" x2="{goal:.1f}" y2="{top + ROW - 2}" '
            'stroke="#000" stroke-width="2"/>'
        )
    yield f'<text x="{end + 6:.1f}" y="{top + 14}" fill="#444">{result.ratio:.2f}</text>'


def _x(value: float) -> float:
    share = math.log(min(max(value, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return LABELS + share * (WIDTH - LABELS - 50)
