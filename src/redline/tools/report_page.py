"""A report as one self-contained HTML page: embedded tables and pictures, light and dark, for any width.

Everything from a run folder is escaped, and the page also forbids scripts, because the folder may be a stranger's.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redline.tools.report import Picture
    from redline.tools.report_tables import Row

_STYLE = """
:root { color-scheme: light dark; --back: #f6f6f4; --panel: #fff; --line: #e2e2de; --text: #1d1f24; --dim: #63676f; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14161b; --panel: #1c1f26; --line: #2c3038; --text: #e8e9ec; --dim: #9aa0ab; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1360px; padding: 16px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 22px; margin: 8px 0 16px; }
h2 { font-size: 17px; margin: 28px 0 10px; }
p, li { color: var(--dim); max-width: 80ch; }
.scroll { overflow-x: auto; background: var(--panel); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 7px 12px; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
th { border-top: 0; white-space: normal; vertical-align: bottom; font-weight: 600; color: var(--dim); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--panel); }
.charts { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; padding: 8px; background: var(--panel); border: 1px solid var(--line); border-radius: 10px; }
img { display: block; width: 100%; height: auto; }
@media (max-width: 640px) {
  th, td { padding: 6px 9px; font-size: 13px; }
  td:first-child { max-width: 45vw; overflow: hidden; text-overflow: ellipsis; }
}
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(
    tables: Sequence[tuple[str, Sequence[Row]]],
    pictures: Sequence[Picture],
    remarks: Sequence[str],
    notes: Sequence[str],
) -> bytes:
    """Return the page as the content of an HTML file."""
    body = ["<h1>Report</h1>"]
    for heading, rows in tables:
        body += [f"<h2>{_escape(heading)}</h2>", *_table(rows)]
    if pictures:
        body += ["<h2>Curves</h2>", '<div class="charts">', *map(_figure, pictures), "</div>"]
    body += [f"<p>{_escape(remark)}</p>" for remark in remarks]
    if notes:
        body += ["<h2>Notes</h2>", "<ul>", *(f"<li>{_escape(note)}</li>" for note in notes), "</ul>"]
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>Redline report</title>",
        f"<style>{_STYLE}</style>",
    ]
    text = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        *head,
        "</head>",
        "<body>",
        *body,
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(text).encode(errors="replace")


def _table(rows: Sequence[Row]) -> list[str]:
    head = "".join(f'<th scope="col">{_escape(name)}</th>' for name in rows[0])
    body = ("".join(f"<td>{_escape(cell)}</td>" for cell in row.values()) for row in rows)
    lines = (f"<tr>{cells}</tr>" for cells in (head, *body))
    return ['<div class="scroll" tabindex="0"><table>', *lines, "</table></div>"]


def _figure(picture: Picture) -> str:
    light, dark = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (picture.light, picture.dark))
    image = f'<img src="{light}" alt="{_escape(picture.caption)}" width="960" height="540">'
    return f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">{image}</picture></figure>'


def _escape(text: str) -> str:
    return html.escape(" ".join(text.split()))
