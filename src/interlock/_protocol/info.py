"""What a server says of itself: the reply to INFO."""

from __future__ import annotations

from typing import Any


def parse_info(info: Any) -> dict[str, str]:
    """The fields of a reply to INFO; no fields if the reply is an error."""
    text: str = info.decode(errors="replace") if isinstance(info, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
