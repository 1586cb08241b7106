"""`fulcrum up --local` as a process, and the commands that read and change the local run from another one."""

import json
import os
import re
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
def environment() -> Iterator[dict[str, str]]:
    """Start a service of three instances; yield the environment in which commands find its local run."""
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
            lines = [process.stdout.readline() for _ in range(4)]
            assert lines[0] == "chat: starting 3 engines (Simulated), a router and an autoscaler\n", lines
            assert lines[1] == (
                "chat: simulated engines make up their text; --engine vllm-cpu runs real ones\n"
            )
            assert lines[3] == "chat: 3 instances serve; stop with Ctrl-C\n", lines
            yield env
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
            assert (process.returncode, out, err) == (0, "stopped\n", "")
        finally:
            process.kill()
            process.communicate()


def fulcrum(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fulcrum_cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)


def test_status_shows_the_service_and_its_instances(environment: dict[str, str]) -> None:
    shown = fulcrum(environment, "status")
    lines = shown.stdout.splitlines()
    assert (shown.returncode, shown.stderr) == (0, "")
    assert lines[0].split()[:4] == ["NAME", "MODEL", "ENGINE", "READY"]
    assert lines[1].split()[:3] == ["chat", "m", "Simulated"]
    assert [line.split()[:2] for line in lines if line.startswith("chat-")] == [
        ["chat-0", "Serving"], ["chat-1", "Serving"], ["chat-2", "Serving"],
    ]  # fmt: skip


def test_a_flip_is_acknowledged_and_shown_by_status(environment: dict[str, str]) -> None:
    flipped = fulcrum(environment, "flip", "chat-1", "--to", "Prefill", "--pin", "10m")
    assert (flipped.returncode, flipped.stderr) == (0, "")
    assert flipped.stdout.startswith("chat-1 → Prefill, pinned for 10m: acknowledged by the router after ")
    line = next(
        line for line in fulcrum(environment, "status", "chat").stdout.splitlines() if "chat-1" in line
    )
    assert line.split()[2] == "Prefill"
    assert re.search(r"Person, pinned for (10m|9m\d\ds)$", line)


def test_a_flip_of_an_unknown_instance_is_refused_in_one_line(environment: dict[str, str]) -> None:
    unknown = fulcrum(environment, "flip", "chat-9", "--to", "Decode")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("error: instance (chat-9) is not in the local run of chat, process ")
    assert unknown.stderr.endswith("; there are chat-0, chat-1, chat-2\n")


def test_a_flip_to_the_current_role_writes_nothing(environment: dict[str, str]) -> None:
    columns = next(
        line.split() for line in fulcrum(environment, "status").stdout.splitlines() if "chat-0" in line
    )
    unchanged = fulcrum(environment, "flip", "chat-0", "--to", columns[2].lower())
    assert (unchanged.returncode, unchanged.stderr) == (0, "")
    assert unchanged.stdout.startswith(
        f"chat-0 already has the role {columns[2]}: nothing written (the local run of"
    )


def test_a_drain_ends_when_the_instance_is_idle_and_can_be_undone(environment: dict[str, str]) -> None:
    """With floors of one for each role, one of the two instances that share a role can be drained."""
    shown = fulcrum(environment, "status").stdout.splitlines()
    roles = {line.split()[0]: line.split()[2] for line in shown if line.startswith("chat-")}
    shared_role = max(roles.values(), key=list(roles.values()).count)
    name = next(name for name, role in roles.items() if role == shared_role)
    drained = fulcrum(environment, "drain", name, "--wait")
    assert (drained.returncode, drained.stderr) == (0, "")
    assert "; drained, no request is left on it (the local run of chat" in drained.stdout
    last = next(other for other, role in roles.items() if role != shared_role)
    refused = fulcrum(environment, "drain", last)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: instance ({last}) may not be drained: 0 instances would serve")
    back = fulcrum(environment, "drain", name, "--undo")
    assert back.stdout.startswith(f"{name}: gets new requests again (")
    again = fulcrum(environment, "drain", name, "--undo")
    assert again.stdout.startswith(f"{name}: was not cordoned: nothing written (")


def test_status_json_is_one_document(environment: dict[str, str]) -> None:
    shown = fulcrum(environment, "status", "-o", "json")
    (service,) = json.loads(shown.stdout)["services"]
    assert (service["name"], service["status"]["ready"], len(service["instances"])) == ("chat", "3/3", 3)


def test_explain_prints_decisions_and_conditions(environment: dict[str, str]) -> None:
    explained = fulcrum(environment, "explain", "--limit", "3")
    assert (explained.returncode, explained.stderr) == (0, "")
    decided, _, rest = explained.stdout.partition("\n\n")
    assert 1 <= len(decided.splitlines()) <= 3
    assert rest.startswith("CONDITION   ")
    assert "target the local run of chat, process " in rest


def test_doctor_finds_no_problem_in_a_healthy_run(environment: dict[str, str]) -> None:
    examined = fulcrum(environment, "doctor")
    assert (examined.returncode, examined.stderr) == (0, ""), examined.stdout
    assert " 0 problems\ntarget the local run of chat, process " in examined.stdout
    report = json.loads(fulcrum(environment, "doctor", "-o", "json").stdout)
    assert {"router", "autoscaler", "pairs", "floors"} <= {check["check"] for check in report["checks"]}


def test_help_imports_no_heavy_module(environment: dict[str, str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "fulcrum_cli", "--help"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    imported = {line.rsplit("|", 1)[1].strip() for line in shown.stderr.splitlines() if "|" in line}
    assert imported.isdisjoint(
        {"httpx", "aiohttp", "uvloop", "rich.live", "fulcrum_operator", "fulcrum_core.api"}
    )
