"""For how long something has been or will be so, spelt for people."""

from fulcrum_core.api.meta import format_duration


def format_age(seconds: float) -> str:
    """Whole seconds, one at least; from ten minutes on minutes, from three hours on hours, then days."""
    for unit_s, letter, minimum in ((86400, "d", 2), (3600, "h", 3), (60, "m", 10)):
        if seconds >= unit_s * minimum:
            return f"{seconds // unit_s:.0f}{letter}"
    return format_duration(max(1.0, round(seconds)))
