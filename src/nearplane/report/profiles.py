"""Panels of Gram-Schmidt lengths, one a layer: a curve for each order of rounding."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nearplane.record import Profile, RunRecord
from nearplane.report.drawing import NO_VALUE, Scale, Tick, curve, plot, positive, short, spanning

ORDERS = ("natural", "activation", "pivoted", "reversed")


def profiles(record: RunRecord) -> str:
    """Return a panel for every layer whose Gram-Schmidt lengths the record holds, a curve for every order."""
    if not record.profiles:
        return ""
    panels: dict[str, list[Profile]] = {}
    for profile in record.profiles:
        panels.setdefault(profile.layer, []).append(profile)
    drawn = "".join(_panel(layer, sorted(found, key=_rank)) for layer, found in panels.items())
    return (
        "<h2>Gram-Schmidt lengths of the inputs</h2>"
        "<p>Each order of rounding splits the same volume into other lengths d, shown in squared units of an input and "
        "of the damped Hessian. The worst case grows with their sum, and one step for all columns costs half the "
        "logarithm of their mean over their geometric mean: a flat curve is best on both counts.</p>"
        f'<div class="profiles">{drawn}</div>'
    )


def _rank(profile: Profile) -> int:
    """Return the place of a profile's order among the known ones; unknown ones come last."""
    return ORDERS.index(profile.order) if profile.order in ORDERS else len(ORDERS)


def _panel(layer: str, found: Sequence[Profile]) -> str:
    """Draw the lengths of one layer's inputs in several orders."""
    y = spanning((length for profile in found for length in profile.lengths), log=True)
    x, least = Scale(low=0, high=1), min(profile.trace for profile in found)
    parts, rows = [], []
    for number, profile in enumerate(found):
        look = f"o{_rank(profile) if _rank(profile) < 4 else number % 4}"
        last = max(1, len(profile.lengths) - 1)
        points = [(index / last, length) for index, length in enumerate(profile.lengths) if positive(length)]
        title = f"{layer}, {profile.order}: sum of d {short(profile.trace)}, "
        title += f"one step costs {profile.spread:.3f} bits per weight"
        parts.append(f"<g><title>{escape(title)}</title>{curve(x, y, points, look)}</g>")
        swatch = (
            f'<svg class="key long" aria-hidden="true"><line class="{look}" x1="0" y1="50%" x2="100%" y2="50%"/></svg>'
        )
        worst = f"{profile.trace / least:.2f}" if least > 0 else NO_VALUE
        rows.append(
            f"<tr><td>{swatch} {escape(profile.order)}</td><td>{worst}</td><td>{profile.spread:.3f} bit</td></tr>"
        )
    ticks = [Tick(place=f"{share}%", text=text) for share, text in ((0, "first"), (50, "half"), (100, "last"))]
    return (
        f'<figure class="profile"><figcaption><h3>{escape(layer)}</h3></figcaption><p class="axis">d</p>'
        f"{plot(f'Gram-Schmidt lengths of {layer}', y, ticks, parts)}"
        '<p class="axis below">column, in the order of rounding</p>'
        '<table class="small"><thead><tr><th scope="col">order</th><th scope="col">sum of d, least = 1</th>'
        '<th scope="col">one step costs</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></figure>"
    )
