"""`fulcrum up --local` and the commands that look at it and change it."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MANIFEST = """
apiVersion: fulcrum.dev/v1alpha1
kind: PDService
metadata: {name: chat}
spec: {model: m, instances: 3}
"""


@pytest.fixture(scope="module")
def surroundings() -> Iterator[dict[str, str]]:
    """A service of three instances that is up, and the environment in which commands find it."""
    with tempfile.TemporaryDirectory(prefix="fulcrum-") as folder:
        env = {**os.environ, "XDG_RUNTIME_DIR": folder}
        manifest = Path(folder) / "chat.yaml"
        manifest.write_text(MANIFEST)
        command = [sys.executable, "-m", "fulcrum_cli", "up", "--local", "--port", "0", "-f", str(manifest)]
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            said = [process.stdout.readline(), process.stdout.readline()]
            assert said[1] == "chat: 3 instances serve; Ctrl-C ends them\n", said
            yield env
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
            assert (process.returncode, out, err) == (0, "ended\n", "")
        finally:
            process.kill()
            process.communicate()


def fulcrum(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fulcrum_cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)


def test_status_shows_the_service_and_its_instances(surroundings: dict[str, str]) -> None:
    shown = fulcrum(surroundings, "status")
    lines = shown.stdout.splitlines()
    assert (shown.returncode, shown.stderr) == (0, "")
    assert lines[0].split()[:4] == ["NAME", "MODEL", "READY", "P"]
    assert lines[1].split()[:3] == ["chat", "m", "3/3"]
    assert [line.split()[:2] for line in lines if line.startswith("chat-")] == [
        ["chat-0", "Serving"], ["chat-1", "Serving"], ["chat-2", "Serving"],
    ]  # fmt: skip


def test_a_flip_is_acknowledged_and_seen_in_status(surroundings: dict[str, str]) -> None:
    flipped = fulcrum(surroundings, "flip", "chat", "chat-1", "--to", "Prefill", "--pin", "10m")
    assert (flipped.returncode, flipped.stderr) == (0, "")
    assert flipped.stdout.startswith("chat-1 → Prefill, pinned for 10m: acknowledged by the router after ")
    line = next(
        line for line in fulcrum(surroundings, "status", "chat").stdout.splitlines() if "chat-1" in line
    )
    assert line.split()[2] == "Prefill"
    assert line.rstrip().endswith("Person, pinned")


def test_a_flip_that_may_not_be_is_refused_in_one_line(surroundings: dict[str, str]) -> None:
    unknown = fulcrum(surroundings, "flip", "chat", "chat-9", "--to", "Decode")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert (
        unknown.stderr == "error: instance (chat-9) is not of service chat; it has chat-0, chat-1, chat-2\n"
    )


def test_explain_tells_decisions(surroundings: dict[str, str]) -> None:
    told = fulcrum(surroundings, "explain", "--limit", "3")
    assert (told.returncode, told.stderr) == (0, "")
    assert 1 <= len(told.stdout.splitlines()) <= 3


def test_help_is_there_at_once(surroundings: dict[str, str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "fulcrum_cli", "--help"]
    shown = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=30, check=True)
    imported = {line.rsplit("|", 1)[1].strip() for line in shown.stderr.splitlines() if "|" in line}
    assert imported.isdisjoint(
        {"httpx", "aiohttp", "uvloop", "rich.live", "fulcrum_operator", "fulcrum_core.api"}
    )
