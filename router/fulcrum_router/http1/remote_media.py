"""Whether a chat has images, audio or video that each engine fetches from elsewhere, by a URL.

The server there may send each engine another file. Decode would then fetch the KV of one file and keep it in
its prefix cache under the hash of another, where every client with that file and the same prefix gets it. So
`decode` gives such a request a cache salt of its own, and `leg_outcomes` blames no engine for its failure.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_DATA = "data:"


def has_remote_media(fields: Mapping[str, Any]) -> bool:
    """Whether a content part of a message has a URL that is not a data URL."""
    messages = fields.get("messages")
    if type(messages) is not list:
        return False
    for message in messages:
        content = message.get("content") if type(message) is dict else None
        if type(content) is list and any(not url.startswith(_DATA) for url in _iter_urls(content)):
            return True
    return False


def _iter_urls(parts: list[Any]) -> Iterator[str]:
    """Yield the URLs of each part: `{"…url": "…"}` and `{"…": {"url": "…"}}`, of any type of part."""
    for part in parts:
        if type(part) is not dict:
            continue
        for name, value in part.items():
            url = value.get("url") if type(value) is dict else value if name.endswith("url") else None
            if type(url) is str:
                yield url
