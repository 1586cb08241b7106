"""LMCache's server sends the password of the remote tier, which is in no argument and no object."""

import json
import os
import shlex
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fulcrum_cli.local.engine_environment import find_engine_environment
from tests.engines.services import require_engines
from tests.unit.operator.engine_cases import CASES, plan_case

PASSWORD = "a-password"
SENT = f"*2\r\n$4\r\nAUTH\r\n${len(PASSWORD)}\r\n{PASSWORD}\r\n".encode()


SERVER_ARGS = "lmcache.mp.autostart.server_args"


def find_remote_tier() -> dict[str, Any]:
    """Return the remote tier of a launch that has one, as LMCache's server gets it."""
    launches = filter(None, (plan_case(case).launch for case in CASES))
    arguments = (argument for launch in launches for argument in launch.command if SERVER_ARGS in argument)
    parts: list[dict[str, Any]] = []

    def keep(part: dict[str, Any]) -> dict[str, Any]:
        parts.append(part)
        return part

    for argument in arguments:
        json.loads(argument, object_hook=keep)
    words = (word for part in parts if SERVER_ARGS in part for word in shlex.split(part[SERVER_ARGS]))
    tier: dict[str, Any] = next(json.loads(word) for word in words if '"type":"resp"' in word)
    return tier


@contextmanager
def record_first_commands() -> Iterator[tuple[int, list[bytes], threading.Event]]:
    """A store that accepts every password; yields port, first commands, and an event for the first."""
    commands, arrived = list[bytes](), threading.Event()

    class Store(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            commands.append(self.request.recv(4096))
            arrived.set()
            self.request.sendall(b"+OK\r\n")
            self.request.recv(4096)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Store) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1], commands, arrived
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.timeout(120)
def test_the_password_of_the_remote_tier_comes_from_a_variable() -> None:
    require_engines()
    tier = find_remote_tier()
    with record_first_commands() as (port, commands, arrived):
        done = subprocess.run(
            [find_engine_environment() / "bin/python", Path(__file__).with_name("connect_remote_tier.py")],
            input=json.dumps({**tier, "host": "127.0.0.1", "port": port}) + "\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            env={**os.environ, "LMCACHE_RESP_PASSWORD": PASSWORD},
        )
        assert arrived.wait(10), done.stderr[-4000:]
    assert set(commands) == {SENT}
    assert PASSWORD not in done.stdout + done.stderr
