"""Limits on the structure of a client's JSON: no body may cost much more than its bytes do.

The size in bytes is limited where a body is read. Once parsed, a value costs up to 30 times its bytes, a name
of an object most of all, and nesting costs recursion in serialisers and in engines. Parsing cannot be
interrupted: no other request is served meanwhile. `bodies` parses every client's body by it, `engine_metrics`
an engine's. What fields mean is read elsewhere.
"""

import gc
from typing import Any

import orjson

MAX_DEPTH = 254
"""Levels of arrays and objects: orjson serialises no more."""
MAX_CONTAINERS = 32_768
"""Arrays and objects in one body."""
MAX_PARSE_S = 0.018
"""Longest time that parsing one body may take, as `estimate_parse_s` estimates it."""
MAX_BACKSLASHES = 2_000_000
"""Backslashes in one body: it takes longer to serialise an escaped character again than to parse it."""
UNCHECKED_BYTES = 262_144
"""A body of this size is parsed in 60 % of `MAX_PARSE_S` at most, whatever it holds."""

_PARSE_S_PER_BYTE, _PARSE_S_PER_VALUE, _PARSE_S_PER_CONTAINER, _PARSE_S_PER_NAME = (
    1.1e-9,
    45e-9,
    75e-9,
    120e-9,
)
"""Measured with orjson 3.13 on a cloud server's core."""
_PARSE_S_PER_LONG_DIGIT = 5.4e-9
"""Added to `_PARSE_S_PER_BYTE` for digits of decimals that lie between two floating-point numbers."""
_SHORT_VALUE_BYTES = 8
"""A value of this length, its comma and space included, takes no longer than `_PARSE_S_PER_VALUE`."""
_MAX_QUOTES = 16_384
"""Quotation marks that are looked for, at 0.2 µs each; bytes after the last one count as outside texts."""
_BACKSLASH, _MAX_BACKSLASH_RUN = ord("\\"), 64
_UNCHECKED_OPENINGS = 32
_UNCOLLECTED_BYTES = 15_000
"""A shorter body has fewer arrays and objects than start a collection of garbage (`server.GC_THRESHOLDS`)."""
_TOO_MANY_CONTAINERS = f"the body has more than {MAX_CONTAINERS} arrays and objects"
_MAX_DROPPED_TEXTS = 32_768
_MAX_EXACT_BYTES = 3_000_000
"""Texts of larger bodies are not dropped before the count: that would take as long as parsing."""
_ALL_BUT_SEPARATORS = bytes(set(range(256)) - set(b",:[{\\"))


class InvalidBody(ValueError):
    """The client's body is not a JSON object, or is larger than a limit; the text says which."""


def parse_limited_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object: the three steps, of which each has a turn of the event loop if a body is long.

    Raises:
        InvalidBody: if `raw` is not a JSON object, or exceeds a limit.
    """
    openings = limit_unparsed(raw)
    parsed = parse_object(raw)
    limit_parsed(parsed, openings)
    return parsed


def limit_unparsed(raw: bytes) -> int:
    """First step: refuse a body that would take too long to parse; count its opening brackets, in texts, too.

    Raises:
        InvalidBody: if a limit is exceeded.
    """
    brackets = raw  # or the separators alone, among which all brackets are
    if len(raw) > UNCHECKED_BYTES:
        brackets = find_separators(raw)
        _limit_parse_time(raw, brackets)
    openings = _count_openings(brackets)
    if openings > MAX_CONTAINERS and len(raw.split(b'"', _MAX_QUOTES)) <= _MAX_QUOTES:
        bytes_in_texts = len(raw) - count_bytes_outside_texts(raw)
        if openings - bytes_in_texts > MAX_CONTAINERS:  # too many even if texts consisted of brackets
            raise InvalidBody(_TOO_MANY_CONTAINERS)
    return openings


def parse_object(raw: bytes) -> dict[str, Any]:
    """Second step, without collections of garbage, which many arrays and objects would start again and again.

    Raises:
        InvalidBody: if `raw` is not a JSON object.
    """
    is_paused = len(raw) > _UNCOLLECTED_BYTES and gc.isenabled()
    if is_paused:
        gc.disable()
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidBody(f"the body is not JSON: {error}") from None
    finally:
        if is_paused:
            gc.enable()
    if type(parsed) is not dict:
        raise InvalidBody("the body is not a JSON object")
    return parsed


def limit_parsed(parsed: dict[str, Any], openings: int) -> None:
    """Third step: check what the bytes cannot show, since brackets in texts are no arrays or objects.

    Raises:
        InvalidBody: if a limit is exceeded.
    """
    if openings >= _UNCHECKED_OPENINGS:  # most bodies have fewer: these are neither deep nor many
        _limit_depth(parsed)
    if openings > MAX_CONTAINERS:
        _limit_containers(parsed)


def _count_openings(raw: bytes) -> int:
    """Count opening brackets; `bytes.count` takes three times as long where there are many."""
    return len(raw) - len(raw.translate(None, b"[{"))


def find_separators(raw: bytes) -> bytes:
    """Return the bytes that separate values of JSON, and backslashes; those within texts are not left out."""
    return raw.translate(None, _ALL_BUT_SEPARATORS)


def estimate_parse_s(size: int, separators: bytes) -> float:
    """Estimate the seconds that parsing takes, from the size of a body and its `find_separators`."""
    return (
        _PARSE_S_PER_BYTE * size
        + _PARSE_S_PER_VALUE * separators.count(b",")
        + _PARSE_S_PER_CONTAINER * _count_openings(separators)
        + _PARSE_S_PER_NAME * separators.count(b":")
    )


def _limit_parse_time(raw: bytes, separators: bytes) -> None:
    """Refuse a long body before it is parsed, if that could take too long."""
    if separators.count(b"\\") > MAX_BACKSLASHES:
        raise InvalidBody(f"the body has more than {MAX_BACKSLASHES} escaped characters")
    if estimate_parse_s(len(raw), separators) > MAX_PARSE_S:
        exact = len(raw) <= _MAX_EXACT_BYTES
        if not exact or estimate_parse_s(len(raw), find_separators(_drop_texts(raw))) > MAX_PARSE_S:
            raise InvalidBody("the body has too many values, names or arrays to be parsed in time")
    if _estimate_long_numbers_s(raw, separators) > MAX_PARSE_S:
        raise InvalidBody("the body has too many long numbers to be parsed in time")


def _estimate_long_numbers_s(raw: bytes, separators: bytes) -> float:
    """Estimate the seconds that parsing takes if all that is no text are decimals of many digits."""
    bytes_s = _PARSE_S_PER_BYTE * len(raw)
    if bytes_s + _PARSE_S_PER_LONG_DIGIT * len(raw) <= MAX_PARSE_S:
        return bytes_s
    digits = count_bytes_outside_texts(raw) - _SHORT_VALUE_BYTES * separators.count(b",")
    return bytes_s + _PARSE_S_PER_LONG_DIGIT * max(0, digits)


def count_bytes_outside_texts(raw: bytes) -> int:
    """Count the bytes of JSON outside texts, each with its opening quote; of very many texts, too many."""
    outside = position = 0
    within = False
    for _ in range(_MAX_QUOTES):
        quote = raw.find(b'"', position)
        if quote < 0:
            break
        if not within:
            outside += quote + 1 - position
            within = True
        elif raw[quote - 1] != _BACKSLASH:
            within = False
        else:
            backslashes = _count_backslashes(raw, quote)
            if backslashes == _MAX_BACKSLASH_RUN:
                break
            within = backslashes % 2 == 1
        position = quote + 1
    return outside + len(raw) - position


def _count_backslashes(raw: bytes, end: int) -> int:
    """Count the backslashes before `end`, at most `_MAX_BACKSLASH_RUN`."""
    last = raw[max(0, end - _MAX_BACKSLASH_RUN) : end]
    return len(last) - len(last.rstrip(b"\\"))


def _drop_texts(raw: bytes) -> bytes:
    """Return a body without its texts; those of a body with very many texts stay in."""
    without_escapes = raw.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in raw else raw
    parts = without_escapes.split(b'"', _MAX_DROPPED_TEXTS * 2)
    return b'"'.join(parts[::2]) if len(parts) <= _MAX_DROPPED_TEXTS * 2 else raw


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
            raise InvalidBody(_TOO_MANY_CONTAINERS)
        level = [value for outer in level for value in _iterate(outer) if type(value) in (list, dict)]


def _iterate(outer: Any) -> Any:
    return outer.values() if type(outer) is dict else outer
