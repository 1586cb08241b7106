"""Starts a bench again with the simulator compiled; not a measurement of its own.

The figures are the same, in half of the time (`tools/compiled`).
"""

import os
import sys

from fulcrum_simulator.engine import batch
from tools.compiled.build import can_compile, compile_packages, describe_simulator


def ensure_compiled() -> None:
    """Start this program again with the simulator compiled, if it is not yet; print which one runs.

    Raises:
        SystemExit: if a C compiler is there and the modules cannot be compiled.
    """
    if not batch.__file__.endswith(".py"):
        print("The simulator runs compiled.", file=sys.stderr)
    elif not can_compile():
        print(
            "The simulator runs as Python, in twice the time: mypyc or a C compiler is missing.",
            file=sys.stderr,
        )
    else:
        print("The simulator is compiled, if it has changed: one minute.", file=sys.stderr)
        folders = str(compile_packages(describe_simulator())), os.environ.get("PYTHONPATH", "")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
