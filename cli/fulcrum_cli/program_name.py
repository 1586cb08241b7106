"""Name that the program was called by, so that commands suggested in messages can be copied.

`__main__` needs it before anything else, so this module imports nothing of the project.
"""

import sys
from pathlib import Path

KUBECTL_PLUGIN_NAME = "kubectl fulcrum"
PROGRAM_NAME = "fulcrum"


def program_name(argv0: str | None = None) -> str:
    """Return `kubectl fulcrum` if the program was started as kubectl's plugin, else `fulcrum`.

    `argv0` is the path of the program; by default that of this process.
    """
    name = Path(sys.argv[0] if argv0 is None else argv0).name
    return KUBECTL_PLUGIN_NAME if name.startswith(("kubectl-", "kubectl_")) else PROGRAM_NAME
