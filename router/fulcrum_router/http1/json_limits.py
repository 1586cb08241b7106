"""Limits on the structure of a client's JSON: no body may cost much more than its bytes do.

The size in bytes is limited where a body is read. Once parsed, a value costs up to 30 times its bytes, a name
of an object most of all, and nesting costs recursion in serialisers and in engines.
"""

from typing import Any

import orjson

MAX_DEPTH = 254
"""Levels of arrays and objects: orjson serialises no more."""
MAX_CONTAINERS = 32_768
"""Arrays and objects in one body."""
MAX_VALUES = 1_048_576
"""Values in one body: as many as the token ids of the longest prompts."""
MAX_NAMES = 262_144
"""Names in all objects of one body; a colon in a text counts, too, if the body has more bytes than this."""

_UNCHECKED_OPENINGS = 32


class InvalidBody(ValueError):
    """The client's body is not a JSON object, or is larger than a limit; the text says which."""


def parse_limited_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InvalidBody: if `raw` is not a JSON object, or exceeds a limit.
    """
    if len(raw) > MAX_NAMES:
        _limit_separators(raw)
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidBody(f"the body is not JSON: {error}") from None
    if type(parsed) is not dict:
        raise InvalidBody("the body is not a JSON object")
    # Most bodies have few brackets: these are neither deep nor many.
    if _count_openings(raw, _UNCHECKED_OPENINGS) >= _UNCHECKED_OPENINGS:
        _limit_depth(parsed)
        if len(raw) > 2 * MAX_CONTAINERS and _count_openings(raw, MAX_CONTAINERS) > MAX_CONTAINERS:
            _limit_containers(parsed)
    return parsed


def _count_openings(raw: bytes, limit: int) -> int:
    """Count opening brackets, at most `limit` of each kind; of few, a split is the fastest count."""
    return len(raw.split(b"[", limit)) + len(raw.split(b"{", limit)) - 2


def _limit_separators(raw: bytes) -> None:
    """Refuse a long body before it is parsed; a limit is exceeded only if there are as many separators."""
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        raise InvalidBody(f"the body has more than {MAX_VALUES} values")
    if raw.count(b":") > MAX_NAMES:
        raise InvalidBody(f"the body has more than {MAX_NAMES} names")


def _limit_depth(parsed: dict[str, Any]) -> None:
    try:
        orjson.dumps(parsed)  # a third of the time for parsing; a walk in Python takes three times as long
    except TypeError:
        raise InvalidBody(f"the body is nested more than {MAX_DEPTH} levels deep") from None


def _limit_containers(parsed: dict[str, Any]) -> None:
    """Count the arrays and objects, since brackets in texts are none."""
    level: list[Any] = [parsed]
    count = 0
    while level:
        count += len(level)
        if count > MAX_CONTAINERS:
            raise InvalidBody(f"the body has more than {MAX_CONTAINERS} arrays and objects")
        level = [value for outer in level for value in _iterate(outer) if type(value) in (list, dict)]


def _iterate(outer: Any) -> Any:
    return outer.values() if type(outer) is dict else outer
