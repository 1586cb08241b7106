"""Under which name the program was called, so that what it advises can be typed as it stands."""

import sys
from pathlib import Path

KUBECTL_PLUGIN_NAME = "kubectl fulcrum"
PROGRAM_NAME = "fulcrum"


def program_name(argv0: str | None = None) -> str:
    """`kubectl fulcrum` for kubectl's plugin, else `fulcrum`. `argv0` is the path of the program."""
    name = Path(sys.argv[0] if argv0 is None else argv0).name
    return KUBECTL_PLUGIN_NAME if name.startswith(("kubectl-", "kubectl_")) else PROGRAM_NAME
