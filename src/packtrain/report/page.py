"""The frame of every page: it stands alone, with no script and nothing to fetch, in light and dark."""

from __future__ import annotations

from html import escape

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a page may load: nothing."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #66727f; --paper: #fff; --line: #e3e8ee; --shade: #f3f5f8;
  --s0: #2a6fdb; --s1: #d9642c; --s2: #2f9e6b; --s3: #9b59b6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --dim: #93a0ad; --paper: #14191f; --line: #2b343d;
  --shade: #1d242c; --s0: #6aa5ff; --s1: #ff9a66; --s2: #5fd19c; --s3: #c58be0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0; } p { margin: .25rem 0; } .dim, figcaption, th { color: var(--dim); }
figcaption { font-size: .85rem; } svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--line); } .tick { font-size: 11px; fill: var(--dim); }
table { border-collapse: collapse; width: 100%; } th { font-weight: normal; }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
"""


def page(title: str, body: str, extra_style: str, policy: str = POLICY) -> str:
    """A whole page. `body` is HTML already; of two rules on the same thing the one in `extra_style` holds."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)} - Packtrain</title><style>{_STYLE}{extra_style}</style></head>"
        f"<body>{body}</body></html>\n"
    )
