"""Makes text from files safe to print: control characters in it could change the terminal, or hide text.

`__main__` uses it for errors, and commands for names that a file contains.
"""

from collections.abc import Iterable
from contextlib import suppress


def print_lines(lines: Iterable[str]) -> None:
    """Print a result. A reader that has closed the pipe must not hide an error that is on its way."""
    with suppress(BrokenPipeError):
        print("\n".join(map(make_printable, lines)))


def make_printable(text: str) -> str:
    """Replace characters that are not printable by their escapes, such as \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
