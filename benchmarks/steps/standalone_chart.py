"""A chart as a file of its own."""

from __future__ import annotations

from markupsafe import Markup, escape

from penjing.report.charts import CSS, DARK, LIGHT

_STANDALONE_CSS = f"""
svg {{ --card: #ffffff; --ink: #26251f; --soft: #6b695f; --hair: #e3e0d6; {LIGHT}
  font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; background: var(--card); }}
@media (prefers-color-scheme: dark) {{ svg {{ --card: #1e211d; --ink: #e6e4da; --soft: #a09e92; --hair: #34372f;
  {DARK} }} }}
text {{ fill: var(--soft); }} text.label, text.name {{ fill: var(--ink); }}
{CSS}
"""


def standalone(chart: Markup, *, title: str) -> Markup:
    """A chart as a standalone SVG file, with colours for light and dark mode, and a title. Empty for an empty chart."""
    if not chart:
        return Markup()
    head, _, body = str(chart).partition(">")
    width, height = (int(number) for number in head.partition('viewBox="0 0 ')[2].partition('"')[0].split())
    margin, above = 10, 30
    size = f'viewBox="{-margin} {-above} {width + 2 * margin} {height + above + margin}" width="{width + 2 * margin}"'
    named = f'<text x="2.0" y="-12.0" text-anchor="start" class="label">{escape(title)}</text>'
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
        f"<style>{_STANDALONE_CSS}</style>{named}{body}"
    )
