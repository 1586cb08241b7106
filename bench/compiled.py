"""Starts a bench again with the simulator or the router compiled; not a measurement of its own.

The figures of simulations are the same, in half of the time (`tools/compiled`).
"""

import os
import sys
from collections.abc import Callable

from fulcrum_router.policy import dispatch
from tools.compiled.build import Program, can_compile, compile_packages, describe_simulator


def ensure_compiled(describe: Callable[[], Program] = describe_simulator) -> None:
    """Start this program again with what `describe` lists compiled, if it is not yet; print which one runs.

    Raises:
        SystemExit: if a C compiler is there and the modules cannot be compiled.
    """
    if not dispatch.__file__.endswith(".py"):  # part of all programs
        print("This runs compiled.", file=sys.stderr)
    elif not can_compile():
        print("This runs as Python, slower: mypyc or a C compiler is missing.", file=sys.stderr)
    else:
        print("Compiling what has changed: up to two minutes.", file=sys.stderr)
        folders = str(compile_packages(describe())), os.environ.get("PYTHONPATH", "")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
