"""Output files of commands: checked before a long run, and replaced as a whole at its end.

A file that is not complete never gets the name that the user gave, and an older file keeps its content until
then. `web.recording.record` is the exception: a recording of a live page grows as long as the page is shown.
"""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fulcrum_cli.option_values import check_writable
from fulcrum_core.errors import InvalidInput


@contextmanager
def replace_file(option: str, path: Path) -> Iterator[BinaryIO]:
    """Yield a file that gets the name `path` at the end; after an exception it is removed.

    A device, a pipe, and a file in a folder that cannot be written are written directly.

    Raises:
        InvalidInput: if the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        if _is_written_directly(path, target):
            with open(path, "wb") as file:
                yield file
        else:
            with _open_beside(target) as file:
                yield file
    except OSError as error:
        raise InvalidInput(option, str(path), f"cannot be written: {error.strerror or error}") from error


def write_text_file(option: str, path: Path, text: str) -> None:
    """Write a whole text file, as `replace_file` does.

    Raises:
        InvalidInput: if the file cannot be written.
    """
    with replace_file(option, path) as file:
        file.write(text.encode())


def check_outputs(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None]) -> None:
    """Check before a long run that each output can be written, and is no input and no other output.

    Raises:
        InvalidInput: for the first output that breaks a rule; outputs and inputs are files by their option.
    """
    known = {option: path for option, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        check_writable(option, path)
        for other, taken in known.items():
            if _is_same_file(path, taken):
                raise InvalidInput(option, path, f"must be another file than {other}")
        known[option] = path


def _is_written_directly(path: Path, target: Path) -> bool:
    # A link such as /dev/stdout leads to an open file, which cannot be replaced.
    is_open_file = path.absolute().parts[1:2] in (("dev",), ("proc",)) and path.is_symlink()
    is_replaceable = path.is_file() and os.access(target.parent, os.W_OK)
    return is_open_file or (path.exists() and not is_replaceable)


@contextmanager
def _open_beside(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file in the folder of `target`, which it replaces at the end."""
    temporary = target.with_name(f".fulcrum-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            if target.exists():
                os.chmod(file.fileno(), target.stat().st_mode & 0o777)
            yield file
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _is_same_file(path: Path, other: Path) -> bool:
    """Whether both are one file; a device may be named several times."""
    if path.exists() and other.exists():
        return path.is_file() and path.samefile(other)
    return os.path.realpath(path) == os.path.realpath(other)
