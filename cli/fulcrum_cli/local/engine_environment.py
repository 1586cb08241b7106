"""Where this machine's real engines are: the environment that `make engine` made, or one that is
configured."""

import functools
import os
import subprocess
from pathlib import Path

from fulcrum_core.errors import InvalidInput

ENVIRONMENT_VARIABLE = "FULCRUM_ENGINE"
"""Names an environment to be used in place of the one that `make engine` made."""

_ENGINE_ENV_TOOL = Path(__file__).parents[3] / "tools" / "engine" / "engine-env"


def find_engine_environment() -> Path:
    """The environment's folder.

    Raises:
        InvalidInput: if it is not there.
    """
    configured = os.environ.get(ENVIRONMENT_VARIABLE)
    folder = Path(configured) if configured else _default_environment()
    if folder is None or not (folder / "bin" / "vllm").exists():
        raise InvalidInput(
            "spec.engine.type", "vLLM", "needs the engine environment: make engine makes it, once"
        )
    return folder


@functools.cache
def _default_environment() -> Path | None:
    """Where `make engine` puts it for this checkout; None outside a checkout, and where it was not made."""
    if not _ENGINE_ENV_TOOL.exists():
        return None
    result = subprocess.run([_ENGINE_ENV_TOOL, "--path"], capture_output=True, text=True, check=False)
    folder = Path(result.stdout.strip())
    return folder if (folder / ".complete").exists() else None


def find_local_model(name: str) -> Path | None:
    """The folder of a model that came with the environment and goes by the folder's name, if it did."""
    folder = find_engine_environment() / name
    return folder if "/" not in name and (folder / "config.json").is_file() else None
