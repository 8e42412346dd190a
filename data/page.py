"""Rows as a page for the browser, in one file: each token a box, what is supervised in colour, ids to point at."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; }
pre, .row { font-family: ui-monospace, monospace; font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }
.row { border: 1px solid #ddd; border-radius: 4px; padding: .6em; }
.row span { border-radius: 2px; color: #777; }
.row span:nth-child(even) { background: #f3f3f3; }
.row span.on { color: #000; background: #b7ebc0; }
.row span.on:nth-child(even) { background: #99dfa6; }
h2 { font-size: 1em; font-weight: 600; margin: 1.6em 0 .3em; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } .row { border-color: #444; } .row span { color: #999; }
  .row span:nth-child(even) { background: #242424; }
  .row span.on { color: #fff; background: #1d5c2c; } .row span.on:nth-child(even) { background: #26713a; }
}
"""


def page(title: str, facts: Sequence[str], template: str, rows: Sequence[tuple[str, str]]) -> str:
    """The whole page.

    Args:
        facts: lines of text: counts, statistics, overlaps.
        template: the text of the chat template.
        rows: a heading and `row_html` of each row.
    """
    shown = "\n".join(f"<h2>{html.escape(place)}</h2>\n<div class=row>{body}</div>" for place, body in rows)
    return (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>\n"
        f"<style>{STYLE}</style>\n<h1>{html.escape(title)}</h1>\n<pre>{html.escape(chr(10).join(facts))}</pre>\n"
        f"<details><summary>chat template</summary><pre>{html.escape(template)}</pre></details>\n{shown}\n</html>\n"
    )


def row_html(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> str:
    """A row, a box for each token."""
    boxes = []
    for place, (token, piece) in enumerate(zip(ids, pieces(tokenizer, ids), strict=True)):
        kind = " class=on" if mask[place] else ""
        text = html.escape(piece).replace("\n", "↵\n") or "·"
        boxes.append(f'<span{kind} title="{place}: {token}">{text}</span>')
    return "".join(boxes)


def pieces(tokenizer: Any, ids: Sequence[int], window: int = 24) -> Iterator[str]:
    """The text of each token; a letter of several tokens stands at the last of them.

    Decoded behind some tokens before it, because some tokenizers drop the space that a text starts with.
    """
    start, shown = 0, ""
    for place in range(len(ids)):
        text = _decoded(tokenizer, ids[start : place + 1])
        if text.endswith("\ufffd") and place + 1 < len(ids) and place - start < 2 * window:
            yield ""
            continue
        yield text[len(shown) :]
        shown = text
        if place - start > window:
            start = place - window // 4
            shown = _decoded(tokenizer, ids[start : place + 1])


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
