"""The folder of a local run, and how other terminals find it.

FOLDER/run.json     where everything is (`RunInfo`); there while the run lasts
FOLDER/store.sock   the store
FOLDER/token        what the router's state port asks for; readable by its owner alone
FOLDER/NAME.log     what each program logs
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
    """Where the parts of a run are."""

    pid: int
    started_at_s: float
    service: str
    namespace: str
    run_dir: str
    store_address: str
    """As `unix:PATH`."""
    token_file: str
    router_url: str
    router_state_url: str
    autoscaler_url: str

    @property
    def token(self) -> str:
        """The token of the router's state port."""
        return Path(self.token_file).read_text(encoding="utf-8").strip()


def runs_root() -> Path:
    """The folder that holds the folders of all runs of this user."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / _USER_FOLDER if base else _scratch_root()


def _scratch_root() -> Path:
    """The folder for temporary files: a short name, since a socket's path takes 107 bytes."""
    return Path(tempfile.gettempdir()) / _USER_FOLDER


@contextmanager
def open_run_folder(own_folder: Path | None, *, service: str) -> Iterator[Path]:
    """The folder of a run. A folder of the user's own keeps its logs; one made here is gone afterwards."""
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
    """A folder for the temporary files of one life of a program. Not in the run's, whose name may be long."""
    folder, prefix = _ensure_folder(_scratch_root()), f"tmp-{os.getpid()}-"
    return tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True)


def _ensure_folder(path: Path) -> Path:
    """The folder, for this user alone; somebody else's is refused, for they could change what is in it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be made: {(error.strerror or 'unknown error').lower()}"
        raise InvalidInput("run folder", path, rule) from error
    if not _is_owned_by_user(path):
        raise InvalidInput("run folder", path, "belongs to another user")
    return path


def _is_owned_by_user(path: Path) -> bool:
    """Whether it is this user's; of a link, the link itself, for whoever made it chose where it leads."""
    return path.lstat().st_uid == os.getuid()


def _remove_stale_folders(root: Path) -> None:
    """Remove what runs that were killed have left. A folder's name tells the process."""
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
    """A file with a fresh token that only this user can read."""
    path = folder / "token"
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_urlsafe(24))
    return path


def write_info(info: RunInfo) -> None:
    """Put `run.json` into the run's folder, whole or not at all."""
    folder = Path(info.run_dir)
    temporary = folder / f"{_INFO_FILE}.new"
    temporary.write_text(json.dumps(asdict(info), indent=2), encoding="utf-8")
    temporary.replace(folder / _INFO_FILE)


def read_live_run(folder: Path) -> RunInfo | None:
    """What `run.json` of that folder says, if its run is still there."""
    try:
        info = RunInfo(**json.loads((folder / _INFO_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return info if _process_exists(info.pid) else None


def find_runs(root: Path | None = None) -> tuple[RunInfo, ...]:
    """The runs of this user that are there now, the latest first. A folder that is not theirs holds none."""
    folder = root or runs_root()
    found = (
        [read_live_run(path) for path in folder.iterdir()]
        if folder.is_dir() and _is_owned_by_user(folder)
        else []
    )
    return tuple(sorted((info for info in found if info), key=lambda info: -info.started_at_s))
