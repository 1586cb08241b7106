"""Reads manifests from files, and finds the manifests that are shipped with the program."""

from pathlib import Path

from fulcrum_core.api.manifest import load_manifest
from fulcrum_core.api.meta import Resource
from fulcrum_core.errors import InvalidInput

_PACKAGE = Path(__file__).parent
_EXAMPLE_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")


def read_manifest(path: Path) -> tuple[Resource, ...]:
    """Return all objects of the file.

    Raises:
        InvalidInput: if the file cannot be read, or an object breaks a rule (the first one is named).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidInput(str(path), "missing", "must be a file that exists") from None
    except OSError as error:
        raise InvalidInput(str(path), error.strerror, "must be a readable text file") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(str(path), "not UTF-8", "must be a readable text file") from error
    return load_manifest(text, source=str(path))


def find_built_in(name: str) -> Path:
    """Return the path of a shipped manifest: package data when installed, `examples/` in a checkout."""
    files = [folder / f"{name}.yaml" for folder in _EXAMPLE_FOLDERS]
    return next((file for file in files if file.exists()), files[-1])
