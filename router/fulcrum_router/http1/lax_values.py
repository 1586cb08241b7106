"""Booleans and whole numbers of a client's JSON as vLLM reads them: with pydantic, which accepts more values.

`bodies` reads the fields with these functions. If the router took for no stream or no limit what the engine
takes for one, the request would evade the rules of streams and the limits of time and of tokens.
"""

from pydantic import TypeAdapter, ValidationError

_BOOL, _INT = TypeAdapter(bool), TypeAdapter(int)
_MAX_INT = 2**63 - 1
"""JSON is written with 64 bits."""
_MAX_TEXT = 10_000
"""Characters of a number that is read: zeros in front of it take time."""


def parse_lax_bool(value: object) -> bool | None:
    """Return the boolean that pydantic reads in a JSON value, such as "on"; None if it reads none."""
    try:
        return _BOOL.validate_python(value)
    except ValidationError:
        return None


def parse_lax_int(value: object) -> int | None:
    """Return the whole number that pydantic reads in a JSON value, such as "1_000".

    None if it reads none, or one of more than 64 bits or 10,000 characters.
    """
    if type(value) is str and len(value) > _MAX_TEXT:
        return None
    try:
        number = _INT.validate_python(value)
    except ValidationError:
        return None
    return number if -_MAX_INT <= number <= _MAX_INT else None
