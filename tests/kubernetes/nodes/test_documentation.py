"""A newcomer's walk: the commands of the tutorial and the how-to pages, word for word, on three nodes."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RecordMeasurement
from tests.documented_commands import EXECUTED_PAGES, find_manifest, list_command_blocks
from tests.kubernetes.nodes.installation import IMAGE, Helm
from tests.paths import ROOT
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.program import ensure_program
from tools.kubernetes.waiting import wait_for

DOCS = ROOT / "docs"
TUTORIAL, INSTALL, *HOW_TO = EXECUTED_PAGES
LOOK_AGAIN = "kubectl get pds chat"
CLEAN_UP = 2
"""Command blocks at the end of the tutorial that remove what the other pages still need."""
REPOSITORY, TAG = IMAGE.rsplit(":", 1)


class Newcomer:
    """Types commands into a shell at the root of a checkout; `kubectl`, `helm`, `fulcrum` are on its PATH."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.typed: set[str] = set()
        self.outputs: dict[str, str] = {}
        self.clients_port = 0
        self._folder = folder
        programs = folder / "bin"
        programs.mkdir()
        _write_program(programs / "kubectl", f'exec {ensure_program()} kubectl "$@"')
        _write_program(
            programs / "helm", f'exec {sys.executable} -m tests.kubernetes.nodes.helm_command "$@"'
        )
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "PATH": path}

    def type_blocks(self, page: str, *, first: int = 0, last: int | None = None) -> None:
        """Type the commands of a page's blocks that say nothing against it."""
        for block in list_command_blocks(DOCS / page)[first:last]:
            if block.note is None:
                for command in block.commands:
                    self.type(command)

    def type(self, command: str) -> None:
        """Type a command, unless it was typed before; fail with what it printed if it fails."""
        if command in self.typed and command != LOOK_AGAIN:
            return
        self.typed.add(command)
        done = subprocess.run(
            ["bash", "-c", self._adapt(command)],
            env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        self.outputs[command] = done.stdout

    def _adapt(self, command: str) -> str:
        """Put in this cluster's image, the folder of the manifest, and the port of the port-forward.

        All versions that the pages name are the one image that was built.
        """
        command = command.replace("registry.example/fulcrum", REPOSITORY)
        command = re.sub(r"\btag=0\.\d+", f"tag={TAG}", command)
        command = command.replace("chat.yaml", str(self._folder / "chat.yaml"))
        return command.replace("localhost:8000", f"localhost:{self.clients_port}")


def _write_program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/bash\n{command}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def newcomer(cluster: Cluster, helm: Helm, tmp_path: Path) -> Iterator[Newcomer]:
    """A newcomer at a cluster without Fulcrum."""
    helm.uninstall()
    (tmp_path / "chat.yaml").write_text(find_manifest(DOCS / TUTORIAL), encoding="utf-8")
    yield Newcomer(cluster, tmp_path)
    helm.uninstall()


@contextlib.contextmanager
def forward_port(newcomer: Newcomer) -> Iterator[None]:
    """The port-forward of the tutorial, at a free port instead of 8000."""
    command = ["kubectl", "port-forward", "deployment/chat-router", ":8000"]
    process = subprocess.Popen(command, env=newcomer.environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found is not None, "kubectl forwards no port"
        newcomer.clients_port = int(found[1])
        yield
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def list_runbook_commands() -> list[str]:
    """List the commands of the runbooks, with the names of the tutorial in place of the capitals.

    Logs of containers that crashed are left out, because none did, and so are searches in the output.
    """
    lines = [
        line.strip()
        for page in sorted((DOCS / "runbooks").glob("*.md"))
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith(("    kubectl ", "    fulcrum "))
    ]
    typed = (line for line in lines if not line.startswith(NOT_TYPED) and " --previous" not in line)
    return sorted({_name_objects(line.partition(" | ")[0]) for line in typed})


def _name_objects(command: str) -> str:
    for capitals, name in (
        ("DECODE_POD", "chat-1"),
        ("NAME", "chat"),
        ("POD", "chat-1"),
        ("INSTANCE", "chat-1"),
        ("FILE", "chat.yaml"),
    ):
        command = re.sub(rf"\b{capitals}\b", name, command)
    return command


NOT_TYPED = (
    "kubectl edit ",  # opens an editor
    "kubectl delete node ",  # would take a node away from the scenarios after it
    "kubectl apply --server-side -f crds/",  # the how-to page for upgrades has it with the flag for conflicts
)


@pytest.mark.timeout(600)
def test_tutorial_how_to_pages_and_runbooks_can_be_followed_word_for_word(
    newcomer: Newcomer, record_measurement: RecordMeasurement
) -> None:
    begin = time.monotonic()
    blocks = list_command_blocks(DOCS / TUTORIAL)
    newcomer.type_blocks(TUTORIAL, last=4)
    with forward_port(newcomer):
        newcomer.type_blocks(TUTORIAL, first=4, last=len(blocks) - CLEAN_UP)
    record_measurement(f"tutorial, without building the image: {time.monotonic() - begin:.1f} s")

    def shows_the_flip() -> bool:
        newcomer.type(LOOK_AGAIN)
        return "3:1" in newcomer.outputs[LOOK_AGAIN]

    wait_for(shows_the_flip, "the flip in the column RATIO", timeout_s=20)
    newcomer.type_blocks(INSTALL, last=1)  # the tutorial ends with its other block
    for page in HOW_TO:
        newcomer.type_blocks(page)
    for command in list_runbook_commands():
        newcomer.type(command)
    newcomer.type_blocks(TUTORIAL, first=len(blocks) - CLEAN_UP)
    pages = [block for page in EXECUTED_PAGES for block in list_command_blocks(DOCS / page)]
    assert {c for block in pages if block.note is None for c in block.commands} <= newcomer.typed
