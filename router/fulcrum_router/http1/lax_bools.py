"""Booleans of a client's JSON as vLLM reads them: pydantic accepts some numbers and words for them.

What the router took for no stream, and the engine for one, would evade the rules of streams.
"""

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})


def parse_lax_bool(value: object) -> bool | None:
    """Return the boolean that pydantic reads in a JSON value; None if it reads none."""
    if type(value) is bool:
        return value
    if type(value) is str:
        word = value.lower()
        return True if word in _TRUE else False if word in _FALSE else None
    if type(value) in (int, float) and value in (0, 1):
        return value == 1
    return None
