"""Build HTML pages: one file with its style, its script and its data inside, which loads nothing from elsewhere.

The report of a run, the page of a plan and the page of jobs share this skeleton, so that they look alike. Each adds the
rules and the script that only it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

# Colours follow the browser's light or dark theme: --c0 to --c10 are the colours of series, --bad marks errors.
STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--raised:#fff;--ink:#1c2128;--dim:#667080;--rule:#e3e6ea;
--link:#a9b3c0;--bad:#d1434b;--c0:#2f6bd8;--c1:#dd7a26;--c2:#2f9e6b;--c3:#8a5fd0;--c4:#c2487e;--c5:#b0952b;--c6:#4aa5b5;
--c7:#8d6e58;--c8:#98a2ae;--c9:#7aa83c;--c10:#a98bb0}
@media(prefers-color-scheme:dark){:root{--paper:#12151a;--card:#1a1e25;--raised:#232932;--ink:#e4e8ee;--dim:#97a1b0;
--rule:#2b313b;--link:#4d5867;--bad:#f0727a;--c0:#6ca0ff;--c1:#f2a057;--c2:#55c892;--c3:#b695f2;--c4:#ee83b1;--c5:#d9c05c;
--c6:#72cbdb;--c7:#bd9c84;--c8:#79828f;--c9:#a5cf6b;--c10:#cdb0d4}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1160px;padding:28px 24px 48px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;line-height:1.25;margin:0}h2{font-size:17px;margin:34px 0 10px}
p.about{margin:2px 0 20px;color:var(--dim)}
.dim{color:var(--dim)}
.card{background:var(--card);border-radius:8px;padding:12px}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(170px,46%),1fr));gap:10px;margin-bottom:18px}
.figures>div{background:var(--card);border-radius:8px;padding:10px 14px}
.figures .name,.figures .more{color:var(--dim);font-size:12px}.figures .value{font-size:19px;font-weight:600}
.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--dim);font-weight:500}
td,th{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
td.n,th.n{text-align:right;width:1%;white-space:nowrap;font-variant-numeric:tabular-nums}
pre{background:var(--card);border-radius:8px;padding:14px;overflow-x:auto;font:13px/1.5 ui-monospace,monospace;margin:0}
select,button,input[type=number],input[type=search]{font:14px system-ui,sans-serif;color:var(--ink);
background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:6px 9px;min-width:0;max-width:100%}
button{cursor:pointer}button:disabled{opacity:.4;cursor:default}
[hidden]{display:none!important}
@media(max-width:640px){body{padding:18px 14px 32px}h1{font-size:20px}}
"""


def html(title: str, body: str, *, style: str = "", script: str = "", data: Any = None) -> str:
    """Return a whole page.

    Args:
        title: Plain text of the browser's tab.
        body: HTML; text from a run, a plan or a job in it must be escaped.
        style: CSS rules after the shared ones.
        script: JavaScript that runs after the body is there.
        data: A value that the script reads with `JSON.parse(document.getElementById("data").textContent)`.
    """
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style></head>\n<body>\n{body}\n",
    ]
    if data is not None:
        parts.append(f'<script type="application/json" id="data">{embedded(data)}</script>\n')
    if script:
        parts.append(f'<script>\n"use strict";\n{script}</script>\n')
    return "".join([*parts, "</body></html>\n"])


def embedded(data: Any) -> str:
    """Return `data` as JSON that may stand inside a <script> element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table whose cells are HTML already; `numbers` are the columns to align right."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="n"' if i in numbers else "" for i in range(len(cells)))
        made = (f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    top = row(head, "th") if head else ""
    return f'<div class="scroll"><table>{top}{"".join(row(cells, "td") for cells in rows)}</table></div>'
