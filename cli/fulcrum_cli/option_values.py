"""Parses and checks the values of single options; a bad value is an `InvalidInput` that names the option.

The commands, their option modules and the live page's controls call these functions; `__main__` declares the
options.
"""

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar, overload

from fulcrum_core.api.meta import parse_duration
from fulcrum_core.errors import InvalidInput

E = TypeVar("E", bound=StrEnum)

PORT_MAX = 65535


@overload
def parse_duration_s(option: str, text: str) -> float: ...
@overload
def parse_duration_s(option: str, text: str | None) -> float | None: ...
def parse_duration_s(option: str, text: str | None) -> float | None:
    """Return the seconds of a duration such as `60s`; None for None.

    Raises:
        InvalidInput: for text that is not a duration, and for 0 or less.
    """
    if text is None:
        return None
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise InvalidInput(option, text, str(error)) from None
    if seconds <= 0:
        raise InvalidInput(option, text, "must be longer than 0s")
    return seconds


def check_port(number: int) -> None:
    """Check a port number; 0 means any free port.

    Raises:
        InvalidInput: if the number is out of range.
    """
    if not 0 <= number <= PORT_MAX:
        raise InvalidInput("--port", number, f"must be between 0 and {PORT_MAX}")


def check_not_combined(option: str, others: Mapping[str, object]) -> None:
    """Check that none of the others, which `option` would ignore, was given.

    Raises:
        InvalidInput: for the first one that was.
    """
    for other, value in others.items():
        if value is not None:
            raise InvalidInput(other, value, f"cannot be combined with {option}")


def check_writable(option: str, file: Path) -> None:
    """Check before a long run that its result can be written to `file`.

    Raises:
        InvalidInput: if it cannot.
    """
    if file.is_dir():
        raise InvalidInput(option, file, "must be a file, not a folder")
    if not file.absolute().parent.is_dir():
        raise InvalidInput(option, file, "must be in a folder that exists")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise InvalidInput(option, file, "must be writable")


def parse_choice(option: str, text: str, choices: type[E], *allowed: E) -> E:
    """Return the member whose value is `text`, ignoring case; `allowed` restricts the choice.

    Raises:
        InvalidInput: with the possible values, if there is no such member.
    """
    members = allowed or tuple(choices)
    for member in members:
        if member.value.lower() == text.lower():
            return member
    raise InvalidInput(option, text, f"is not one of {', '.join(member.value for member in members)}")
