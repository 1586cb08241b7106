"""A model's own description, as a file of this machine."""

import functools
import json
from pathlib import Path

from fulcrum_core.errors import InvalidInput
from fulcrum_core.models import ModelFacts, parse_model_config


@functools.cache
def read_model_config(path: Path) -> ModelFacts:
    """The facts of a model.

    Args:
        path: Its config.json, or the folder that holds it.

    Raises:
        InvalidInput: if it cannot be read, or describes no model.
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
        raise InvalidInput(str(path), "no object", rule)
    return parse_model_config(loaded, source=str(path))
