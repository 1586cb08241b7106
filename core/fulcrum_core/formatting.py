"""Format counts and lists for messages, so that all programs write "1 instance" and "2 instances" alike."""

from collections.abc import Sequence


def format_count(count: int, one: str, many: str = "") -> str:
    """`1 instance`, `2 instances`, `12,000 tokens`. `many` is an irregular plural."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def format_list(items: Sequence[str], *, at_most: int) -> str:
    """`a, b, c`; beyond `at_most` items, `a, b and 5 more`."""
    more = f" and {len(items) - at_most} more" if len(items) > at_most else ""
    return ", ".join(items[:at_most]) + more
