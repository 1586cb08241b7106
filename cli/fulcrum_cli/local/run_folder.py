"""The folder of a local run, in which commands in other terminals find the run.

FOLDER/run.json     addresses of the run's parts (`RunInfo`); exists while the run does
FOLDER/store.sock   socket of the store
FOLDER/token        token for the router's state port; readable by its owner only
FOLDER/NAME.log     log of each program

`run` writes it; `target`, and so every command, reads it.
"""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fulcrum_core.errors import InvalidInput

_INFO_FILE = "run.json"
_USER_FOLDER = f"fulcrum-{os.getuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Addresses of a run's parts; the content of run.json."""

    pid: int
    started_at_s: float
    service: str
    namespace: str
    run_dir: str
    store_address: str
    """Address for `open_store`: `unix:PATH`."""
    token_file: str
    router_url: str
    router_state_url: str
    autoscaler_url: str
    router_metrics_url: str

    @property
    def token(self) -> str:
        """Token for the router's state port."""
        return Path(self.token_file).read_text(encoding="utf-8").strip()


def runs_root() -> Path:
    """The folder with the folders of all runs of this user."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / _USER_FOLDER if base else _scratch_root()


def _scratch_root() -> Path:
    """The folder for temporary files. Its path is short: a socket's path has at most 107 bytes."""
    return Path(tempfile.gettempdir()) / _USER_FOLDER


@contextmanager
def open_run_folder(own_folder: Path | None, *, service: str) -> Iterator[Path]:
    """Create the folder of a run and remove it afterwards; in `own_folder` the logs remain.

    Raises:
        InvalidInput: if the folder cannot be created, belongs to another user, or is used by a live run.
    """
    for root in {_scratch_root()} if own_folder else {_scratch_root(), runs_root()}:
        _remove_stale_folders(_ensure_folder(root))
    if own_folder:
        _ensure_folder(own_folder)
        if read_live_run(own_folder):
            raise InvalidInput("run folder", own_folder, "is used by another run")
    folder = own_folder or _ensure_folder(runs_root() / f"{service}-{os.getpid()}-{secrets.token_hex(2)}")
    try:
        yield folder
    finally:
        for name in (_INFO_FILE, "token"):
            (folder / name).unlink(missing_ok=True)
        if own_folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for a program's temporary files; not in the run's folder, whose path may be long."""
    folder, prefix = _ensure_folder(_scratch_root()), f"tmp-{os.getpid()}-"
    return tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True)


def _ensure_folder(path: Path) -> Path:
    """Create a folder for this user only; one of another user is refused, who could change its content."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be created: {(error.strerror or 'unknown error').lower()}"
        raise InvalidInput("run folder", path, rule) from error
    if not _is_owned_by_user(path):
        raise InvalidInput("run folder", path, "belongs to another user")
    return path


def _is_owned_by_user(path: Path) -> bool:
    """Whether this user owns the path. A link is not followed: its owner decides where it points."""
    return path.lstat().st_uid == os.getuid()


def _remove_stale_folders(root: Path) -> None:
    """Remove the folders of runs that were killed. A folder's name ends in its process id and a suffix."""
    for folder in root.iterdir():
        pid = folder.name.split("-")[-2:][0]
        if pid.isdecimal() and not _process_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_token(folder: Path) -> Path:
    """Write a new token to a file that only this user can read; returns the file."""
    path = folder / "token"
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_urlsafe(24))
    return path


def write_info(info: RunInfo) -> None:
    """Write run.json into the run's folder, atomically."""
    folder = Path(info.run_dir)
    temporary = folder / f"{_INFO_FILE}.new"
    temporary.write_text(json.dumps(asdict(info), indent=2), encoding="utf-8")
    temporary.replace(folder / _INFO_FILE)


def read_live_run(folder: Path) -> RunInfo | None:
    """Read run.json of a folder; None if there is none or its process has ended."""
    try:
        info = RunInfo(**json.loads((folder / _INFO_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return info if _process_exists(info.pid) else None


def find_runs(root: Path | None = None) -> tuple[RunInfo, ...]:
    """Live runs of this user, the latest first. A folder that another user owns is not read."""
    folder = root or runs_root()
    found = (
        [read_live_run(path) for path in folder.iterdir()]
        if folder.is_dir() and _is_owned_by_user(folder)
        else []
    )
    return tuple(sorted((info for info in found if info), key=lambda info: -info.started_at_s))
