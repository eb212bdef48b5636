"""The page of the live view, whole in one file: HTML with its style and script inside, so that it
needs nothing from anywhere, and may load nothing: its policy allows these two alone, by hash.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

_SCRIPTS = ("run.js", "grid.js", "lists.js", "table.js", "timeline.js", "sources.js", "page.js")


@dataclass(frozen=True, slots=True)
class Page:
    """policy: for the header Content-Security-Policy."""

    html: str
    policy: str


def live_page() -> Page:
    """Asks for a key if it needs one, then shows /inspect/stream."""
    return _page("", connects="'self'")


def recorded_page(lines: Iterable[bytes]) -> Page:
    """Has a run in itself. lines: of JSON, a start and then a frame for each step."""
    data = base64.b64encode(gzip.compress(b"".join(lines), 6)).decode()
    holder = f'<script type="application/json" id="recording">{json.dumps(data)}</script>'
    return _page(holder, connects="'none'")


def _page(recording: str, *, connects: str) -> Page:
    web = files("pagedkv.inspect") / "web"
    style = (web / "page.css").read_text("utf-8")
    script = "\n".join((web / name).read_text("utf-8") for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        f"connect-src {connects}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    html = (web / "page.html").read_text("utf-8")
    for mark, text in (
        ("{policy}", policy),
        ("{style}", style),
        ("{recording}", recording),
        ("{script}", script),
    ):
        before, _, after = html.partition(mark)
        html = before + text + after
    return Page(html, policy + "; frame-ancestors 'none'")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
