"""Where this machine's real engines are: the environment that `make engine` made, or one that is named."""

import functools
import os
import subprocess
from pathlib import Path

from fulcrum_core.errors import InvalidInput

VARIABLE = "FULCRUM_ENGINE"
"""Names an environment to be used in place of the one that `make engine` made."""

_TOOL = Path(__file__).parents[3] / "tools" / "engine" / "engine-env"


def engine_environment() -> Path:
    """The environment's folder.

    Raises:
        InvalidInput: if it is not there.
    """
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else _made()
    if folder is None or not (folder / "bin" / "vllm").exists():
        raise InvalidInput(
            "spec.engine.type", "vLLM", "needs the engine environment: make engine makes it, once"
        )
    return folder


@functools.cache
def _made() -> Path | None:
    """Where `make engine` puts it for this checkout; None outside a checkout, and where it was not made."""
    if not _TOOL.exists():
        return None
    said = subprocess.run([_TOOL, "--path"], capture_output=True, text=True, check=False)
    folder = Path(said.stdout.strip())
    return folder if (folder / ".complete").exists() else None


def local_model(name: str) -> Path | None:
    """The folder of a model that came with the environment and goes by the folder's name, if it did."""
    folder = engine_environment() / name
    return folder if "/" not in name and (folder / "config.json").is_file() else None
