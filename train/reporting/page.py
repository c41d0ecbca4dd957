"""The frame, the style and common parts of pages. A page is one file that needs no network."""

import base64
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any


def page_html(title: str, body: Iterable[str]) -> bytes:
    """A page with the parts of `body`; empty parts are left out."""
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )
    # The name of a folder may have bytes that are not UTF-8.
    return page.encode("utf-8", "xmlcharrefreplace")


def escape(value: Any) -> str:
    """The value as text of a page."""
    return html.escape(str(value))


def setting(value: Any) -> str:
    """The value of a setting as text of a page: a text as it is, another value as JSON."""
    return escape(value if isinstance(value, str) else json.dumps(value))


def section(heading: str, content: str) -> str:
    """A part of a page with a heading."""
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


_DARK = "(prefers-color-scheme: dark)"
_NARROW = "(max-width: 48rem)"


def figure_html(text: str, pictures: Sequence[bytes], narrow: Sequence[bytes] = ()) -> str:
    """A picture in the colours of the page.

    Args:
      text: Description for readers who cannot see the picture.
      pictures: PNGs for a light and a dark page.
      narrow: PNGs for a narrow light and dark page; empty if `pictures` suit it.
    """
    light, dark = map(_data, pictures)
    sources = [(_DARK, dark)]
    if narrow:
        # A browser takes the first source that fits.
        narrow_light, narrow_dark = map(_data, narrow)
        sources[:0] = [(f"{_NARROW} and {_DARK}", narrow_dark), (_NARROW, narrow_light)]
    parts = "".join(f'<source media="{media}" srcset="{data}">' for media, data in sources)
    return f'<figure><picture>{parts}<img alt="{escape(text)}" src="{light}"></picture></figure>'


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def grid(parts: Iterable[str]) -> str:
    """Parts side by side, or one below the other on a narrow page."""
    return f'<div class="grid">{"".join(parts)}</div>'


_STYLE = """
:root { color-scheme: light dark; --page: #f6f8fa; --card: #ffffff; --text: #1f2328;
  --muted: #59636e; --line: #d8dee4; --train: #0072b2; --held-out: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #161b22; --text: #e6edf3;
  --muted: #9198a1; --line: #30363d; --train: #56b4e9; --held-out: #f0883e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 62rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
header { margin-bottom: 1.5rem; }
h1 { margin: 0; font-size: 1.75rem; letter-spacing: -0.01em; overflow-wrap: anywhere; }
header p { margin: 0.25rem 0 0; color: var(--muted); }
h2 { margin: 2.25rem 0 0.75rem; font-size: 1.15rem; }
h3 { margin: 0; padding: 0.55rem 0.85rem; font-size: 0.85rem; font-weight: 600;
  color: var(--muted); border-bottom: 1px solid var(--line); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr));
  gap: 0.75rem; margin: 0 0 1.25rem; }
.tiles > div, figure, section > pre, .card, section > table { background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; }
.tiles > div { padding: 0.75rem 0.9rem; }
dt { color: var(--muted); font-size: 0.8rem; }
dd { margin: 0.1rem 0 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
figure { margin: 0; padding: 0.75rem; }
img { display: block; width: 100%; height: auto; }
pre { margin: 0; padding: 0.85rem 1rem; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
.legend { display: flex; flex-wrap: wrap; gap: 0.25rem 1.5rem; margin: 0 0 0.75rem; padding: 0;
  list-style: none; overflow-wrap: anywhere; }
.train { color: var(--train); }
.held-out { color: var(--held-out); }
.grid { display: grid; gap: 0.75rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); }
.columns { columns: 2 24rem; column-gap: 0.75rem; }
summary { padding: 0.55rem 0.85rem; font-size: 0.85rem; color: var(--muted); cursor: pointer; }
details[open] summary { border-bottom: 1px solid var(--line); }
.card { break-inside: avoid; margin-bottom: 0.75rem; overflow: hidden; }
table { width: 100%; border-collapse: separate; border-spacing: 0; font-size: 0.85rem; }
th, td { padding: 0.3rem 0.85rem; text-align: left; vertical-align: top; font-weight: 400;
  overflow-wrap: anywhere; }
tr + tr > * { border-top: 1px solid var(--line); }
th { width: 45%; color: var(--muted); }
table.runs { table-layout: fixed; }
table.runs th { width: auto; }
td { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 0.8rem; }
"""
