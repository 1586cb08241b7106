"""What a program of a local run owes to the one that started it: a ready line, a plain error, its end."""

import json
import os
import signal
import subprocess
import sys

import pytest

HEAD = "import os, signal, sys, time\nfrom fulcrum_cluster.process import *\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_ready_is_one_line_with_the_ports() -> None:
    ended = run("announce_ready(port=8101, side_channel_port=8102)")
    word, _, ports = ended.stdout.partition(" ")
    assert (word, json.loads(ports), ended.stdout.count("\n")) == (
        "ready",
        {"port": 8101, "side_channel_port": 8102},
        1,
    )


def test_ready_is_said_at_once() -> None:
    code = f"{HEAD}announce_ready(port=1)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == 'ready {"port": 1}\n'
        process.communicate("")


def test_an_error_is_one_line_and_exit_code_2() -> None:
    ended = run("exit_with_error('--port (80) is in use')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "error: --port (80) is in use\n")


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is told on Linux alone")
def test_a_child_ends_with_a_parent_that_was_killed() -> None:
    """The child holds the pipe open: the pipe's end is the child's end."""
    child = f"{HEAD}die_with_parent()\nannounce_ready(pid=os.getpid())\ntime.sleep(60)"
    parent = (
        "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', sys.argv[1]])\ntime.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        os.kill(process.pid, signal.SIGKILL)
        assert process.stdout.read() == ""
