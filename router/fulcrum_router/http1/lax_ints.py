"""Whole numbers of a client's JSON as vLLM reads them: pydantic accepts some texts, floats and booleans.

What the router took for no limit, and the engine for one, would evade the limits of time and of tokens.
"""

import re

_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""White space that Rust's `trim` removes; Python's `strip` removes four separators more."""
_DIGITS = re.compile(r"\d+(?:_\d+)*", re.ASCII)
_MAX_FLOAT = 2.0**63
_MAX_DIGITS = 18
"""Digits of a text that is read, without leading zeros: JSON is written with 64 bits."""


def parse_lax_int(value: object) -> int | None:
    """Return the whole number that pydantic reads in a JSON value; None if it reads none, or a long one."""
    if type(value) in (int, bool):
        return int(value)  # type: ignore[call-overload, no-any-return]  # narrowed by the line above
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) < _MAX_FLOAT else None
    return _parse_text(value) if type(value) is str else None


def _parse_text(text: str) -> int | None:
    text = text.strip(_WHITE_SPACE)
    sign = -1 if text[:1] == "-" else 1
    unsigned = text[1:] if text[:1] in ("+", "-") else text
    whole, point, fraction = unsigned.partition(".")
    if point and (not fraction or fraction.strip("0")):
        return None
    if whole[:1] == "0":
        whole = whole.lstrip("0_") or whole[-1]
    if len(whole) > _MAX_DIGITS or _DIGITS.fullmatch(whole) is None:
        return None
    return sign * int(whole)
