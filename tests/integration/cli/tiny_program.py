"""A program that keeps the contract of spawned programs, and nothing more.

`test_supervised_process` starts it in the place of an engine, and tells it how to fail.
"""

import argparse
import signal
import socket
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Listen, say so, and wait for SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ignore-sigterm", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--never-ready", action="store_true", help="never become ready")
    parser.add_argument("--refuse", help="turn the arguments down with this line")
    parser.add_argument("--leave-file", help="leave a temporary file of this name")
    given, _ = parser.parse_known_args()
    if given.refuse:
        print(f"error: {given.refuse}", file=sys.stderr)
        sys.exit(2)
    if given.leave_file:
        Path(tempfile.gettempdir(), given.leave_file).touch()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if given.ignore_sigterm else lambda *_: sys.exit(0))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", given.port))
        listener.listen()
        port = listener.getsockname()[1]
        if not given.never_ready:
            print(f'ready {{"port": {port}, "state_port": {port}}}', flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
