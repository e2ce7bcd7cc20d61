"""For the site: what lies outside of docs/ is no page of it, so a link there is shown as the path in the repository."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|results|recipes|tables|sweeps|src|tests|CHANGELOG)[^)#]*)\)"
)


def on_page_markdown(markdown: str, **rest: Any) -> str:
    """Replace such links by their text and path."""
    return _OUTSIDE.sub(_told, markdown)


def _told(match: re.Match[str]) -> str:
    text, path = match.groups()
    return text if path.split("/")[-1] in text else f"{text} (`{path}`)"
