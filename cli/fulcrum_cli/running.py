"""Finds the local service that a command is about."""

from fulcrum_core.errors import InvalidInput
from fulcrum_operator.local import RunInfo, find_runs


def find_running(name: str | None) -> RunInfo:
    """The running service of that name, the latest one of several; without a name the only one there is.

    Raises:
        InvalidInput: if there is none, or without a name if there are several.
    """
    runs = find_runs()
    if not runs:
        raise InvalidInput("SERVICE", name or "none", "does not run: no service runs on this machine")
    services = sorted({run.service for run in runs})
    names = ", ".join(services)
    if name is None and len(services) > 1:
        raise InvalidInput("SERVICE", names, "are running: name one")
    found = [run for run in runs if name in (None, run.service)]
    if not found:
        raise InvalidInput("SERVICE", name, f"does not run on this machine; running: {names}")
    return found[0]
