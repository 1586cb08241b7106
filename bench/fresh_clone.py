"""Measures a fresh clone: seconds to the first flip, size of the environment, seconds from Ctrl-C to the end.

Clones this repository into a temporary folder and runs `make play` there without a screen. The second run has
its packages cached.

    make bench NAME=fresh_clone

Exit code 1 if the first flip takes more than 60 s, the environment more than 300 MB, or Ctrl-C more than 2 s.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.kubernetes.waiting import wait_for

ROOT = Path(__file__).parents[1]
FLIP_LINE_PATTERN = re.compile(r"\S+ (Prefill|Decode) → (Prefill|Decode):")
FIRST_FLIP_MAX_S, ENVIRONMENT_MAX_MB, END_MAX_S = 60.0, 300.0, 2.0


def measure_size_mb(folder: Path) -> float:
    """Return the folder's size on disk, in MB (10⁶ bytes)."""
    files = (path.lstat() for path in folder.rglob("*"))
    return sum(file.st_blocks for file in files) * 512 / 1e6


def list_processes_of(clone: Path) -> list[str]:
    """Return the processes whose program is in the clone's environment."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((process / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue  # it ended meanwhile
    return [line for line in lines if line.startswith(str(clone))]


def measure(clone: Path) -> tuple[float, float]:
    """Return the seconds to the first flip, and from Ctrl-C to the end of all processes."""
    began_s = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(clone)], check=True)
    command = ["make", "play", "ARGS=--headless"]
    play = subprocess.Popen(command, cwd=clone, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert play.stdout is not None
    flip = next(filter(FLIP_LINE_PATTERN.search, play.stdout), None)
    if flip is None:
        raise SystemExit(f"error: make play ended with {play.wait()} before a flip")
    first_flip_s = time.monotonic() - began_s
    print(flip.rstrip(), flush=True)
    os.killpg(play.pid, signal.SIGINT)
    end_s = wait_for(
        lambda: play.poll() is not None and not list_processes_of(clone), "all processes to end", timeout_s=60
    )
    return first_flip_s, end_s


def main() -> int:
    """Measure once and print the three figures; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="fulcrum-") as folder:
        clone = Path(folder) / "clone"
        first_flip_s, end_s = measure(clone)
        environment_mb = measure_size_mb(clone / ".venv")
    print(f"first flip after {first_flip_s:.1f} s from the start of the clone")
    print(f"environment {environment_mb:.0f} MB")
    print(f"everything ended {end_s:.2f} s after Ctrl-C")
    good = first_flip_s <= FIRST_FLIP_MAX_S and environment_mb <= ENVIRONMENT_MAX_MB and end_s <= END_MAX_S
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
