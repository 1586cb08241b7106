"""Finds the environment with vLLM that `make engine` installs, and reads the config.json files of models.

Used by `engines` to start vLLM and by `fulcrum plan` to read a model without a cluster.

It installs nothing.
"""

import functools
import json
import os
import subprocess
from pathlib import Path

from fulcrum_core.errors import InvalidInput
from fulcrum_core.models import ModelFacts, parse_model_config

ENVIRONMENT_VARIABLE = "FULCRUM_ENGINE"
"""Name of the variable with the folder of another environment than the one of `make engine`."""

_ENGINE_ENV_TOOL = Path(__file__).parents[3] / "tools" / "engine" / "engine-env"


def find_engine_environment() -> Path:
    """Return the folder of the engine environment.

    Raises:
        InvalidInput: if there is none.
    """
    configured = os.environ.get(ENVIRONMENT_VARIABLE)
    folder = Path(configured) if configured else _default_environment()
    if folder is None or not (folder / "bin" / "vllm").exists():
        rule = "needs the engine environment on this machine; install it with `make engine`"
        raise InvalidInput("spec.engine.type", "vLLM", rule)
    return folder


@functools.cache
def _default_environment() -> Path | None:
    """The folder that `make engine` filled for this checkout; None if there is none."""
    if not _ENGINE_ENV_TOOL.exists():
        return None
    result = subprocess.run([_ENGINE_ENV_TOOL, "--path"], capture_output=True, text=True, check=False)
    folder = Path(result.stdout.strip())
    return folder if (folder / ".complete").exists() else None


def find_local_model(name: str) -> Path | None:
    """Return the folder of a model that the engine environment contains under this name, if it does.

    Raises:
        InvalidInput: if there is no engine environment.
    """
    folder = find_engine_environment() / name
    return folder if "/" not in name and (folder / "config.json").is_file() else None


@functools.cache
def read_model_config(path: Path) -> ModelFacts:
    """Read the facts of a model from its config.json.

    Args:
        path: The config.json, or the folder that contains it.

    Raises:
        InvalidInput: if the file cannot be read or does not describe a model.
    """
    path = path / "config.json" if path.is_dir() else path
    rule = "must be a model's config.json"
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(path), error.strerror or "unreadable", rule) from error
    except ValueError as error:
        raise InvalidInput(str(path), "not JSON", rule) from error
    if not isinstance(loaded, dict):
        raise InvalidInput(str(path), "not a JSON object", rule)
    return parse_model_config(loaded, source=str(path))
