"""Under which name the program was called, so that what it advises can be typed as it stands."""

import sys
from pathlib import Path

PLUGIN = "kubectl fulcrum"
PROGRAM = "fulcrum"


def program_name(called: str | None = None) -> str:
    """`kubectl fulcrum` for kubectl's plugin, else `fulcrum`. `called` is the path of the program."""
    name = Path(sys.argv[0] if called is None else called).name
    return PLUGIN if name.startswith(("kubectl-", "kubectl_")) else PROGRAM
