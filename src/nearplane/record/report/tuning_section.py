"""What was trained after the solve: a sentence, and the curve by which the kept state was chosen."""

from __future__ import annotations

from html import escape

from nearplane.record.record import RunRecord
from nearplane.record.report.drawing import Scale, Tick, curve, plot, short, spanning


def tuning(record: RunRecord) -> str:
    """Return the curves of held-out and training KL, and what came of it; nothing where nothing was tuned."""
    tuned = record.tuning
    if tuned is None:
        return ""
    held = [(float(point.step), point.held_out) for point in tuned.curve]
    training = [(float(point.step), point.training) for point in tuned.curve if point.training is not None]
    last = max(1, tuned.curve[-1].step)
    x, y = Scale(low=0, high=last), spanning((value for _, value in (*held, *training)), least=0.0)
    parts, keys = [], []
    for look, name, points in (("o0", "held-out windows", held), ("o1", "windows trained on", training)):
        shown = ", ".join(f"step {step:.0f}: {short(value)}" for step, value in points)
        parts.append(f"<g><title>{escape(f'{name}: {shown}')}</title>{curve(x, y, points, look)}</g>")
        keys.append(
            f'<tr><td><svg class="key long" aria-hidden="true"><line class="{look}" x1="0" y1="50%" x2="100%" y2="50%"/></svg> '
            f"{escape(name)}</td><td>{short(points[-1][1]) if points else ''}</td></tr>"
        )
    ticks = [Tick(place=f"{100 * share}%", text=f"{share * last:.0f}") for share in (0, 0.5, 1)]
    before = "Losses on this page are those of the tuned codes and steps, along the tuned network; those before are in the record."
    return (
        f"<h2>Tuning</h2><p>{escape(_capital(tuned.sentence()))}. {escape(_capital(tuned.looked_at()))}. {escape(before)}</p>"
        '<div class="panels"><figure class="panel"><figcaption><h3>KL to the original, nats per token</h3></figcaption>'
        f"{plot('KL to the original while tuning', y, ticks, parts)}"
        '<p class="axis below">step of the optimizer</p>'
        '<table class="small"><thead><tr><th scope="col">on</th><th scope="col">KL at the end</th></tr></thead>'
        f"<tbody>{''.join(keys)}</tbody></table></figure></div>"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
