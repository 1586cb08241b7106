"""Checks of single options, with one line that names the option, the value and the rule."""

from enum import StrEnum
from typing import TypeVar

from fulcrum_core.api.meta import parse_duration
from fulcrum_core.errors import InvalidInput

E = TypeVar("E", bound=StrEnum)

PORT_MAX = 65535


def parse_duration_s(option: str, text: str | None) -> float | None:
    """Seconds of a duration such as `60s`; None if it was not given."""
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
    """Refuse a number that is no port; 0 stands for any free one."""
    if not 0 <= number <= PORT_MAX:
        raise InvalidInput("--port", number, f"must be between 0 and {PORT_MAX}")


def parse_choice(option: str, text: str, choices: type[E], *allowed: E) -> E:
    """The member that `text` names, in any case."""
    members = allowed or tuple(choices)
    for member in members:
        if member.value.lower() == text.lower():
            return member
    raise InvalidInput(option, text, f"is not one of {', '.join(member.value for member in members)}")
