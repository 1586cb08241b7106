"""A test run that starts a node leaves no process, mount or cgroup, however the run ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.machine import KERNEL_SETTINGS
from tools.kubernetes.program import CGROUP_ROOT
from tools.kubernetes.waiting import wait_for

TEST_SOURCE = """
import threading
from pathlib import Path

import pytest


def test_with_a_node(start_cluster):
    cluster = start_cluster(1)
    Path({report!r}).write_text(str(cluster.folder))
    if {ending!r} == "interrupted":
        threading.Event().wait()
    assert {ending!r} == "passed"
"""


@pytest.mark.timeout(480)
@pytest.mark.usefixtures("control_plane")  # skips where no cluster can run
@pytest.mark.parametrize("ending", ["passed", "failed", "interrupted"])
def test_a_run_with_a_node_leaves_no_process_mount_or_cgroup(tmp_path: Path, ending: str) -> None:
    before = _snapshot_machine()
    with _start_test_run(tmp_path, ending) as run:
        folder, cluster_pid = _read_cluster(run, tmp_path / "report")
        if ending == "interrupted":
            run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=300)
    assert (_expected_exit_code(ending), []) == (run.returncode, _find_processes(folder, cluster_pid)), output
    assert _snapshot_machine() == before
    assert _find_cgroups(folder) == []


def _expected_exit_code(ending: str) -> int:
    return {"passed": 0, "failed": 1, "interrupted": 2}[ending]


@contextlib.contextmanager
def _start_test_run(tmp_path: Path, ending: str) -> Iterator[subprocess.Popen[str]]:
    """Run pytest in a process of its own; kill it at the end of the block."""
    report, test = tmp_path / "report", tmp_path / "test_run.py"
    test.write_text(TEST_SOURCE.format(report=str(report), ending=ending))
    options = [
        "-p",
        "tests.kubernetes.conftest",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
        "-c",
        os.devnull,
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "--import-mode=importlib", *options, str(test)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=_restore_interrupts,
    ) as run:  # fmt: skip
        try:
            yield run
        finally:
            run.kill()


def _read_cluster(run: subprocess.Popen[str], report: Path) -> tuple[Path, int]:
    """Wait for the run's cluster; return its folder and the id of its first process, 0 if it has ended."""
    wait_for(lambda: run.poll() is not None or bool(report.read_text()), "the run's cluster", timeout_s=100)
    folder = Path(report.read_text())
    state = folder / "state.json"
    return folder, int(json.loads(state.read_text())["hub"]) if state.exists() else 0


def _restore_interrupts() -> None:
    """Restore SIGINT: a shell starts background jobs with it ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _snapshot_machine() -> dict[str, object]:
    """Return the machine's mounts, interfaces, kernel settings and folders that a cluster could change."""
    settings = [*KERNEL_SETTINGS, "net-ipv4-ip_forward", "net-netfilter-nf_conntrack_max"]
    places = {name: Path("/proc/sys", *name.split("-")) for name in settings}
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, check=True).stdout)
    return {
        "mounts": [line.split(" ", 2)[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()],
        "interfaces": sorted(link["ifname"] for link in links),
        "settings": {name: place.read_text() for name, place in places.items() if place.exists()},
        "folders": sorted(str(p) for p in (Path("/usr/libexec/kubernetes"), Path("/etc/cni")) if p.exists()),
    }


def _find_processes(folder: Path, hub: int) -> list[str]:
    """Return the command lines that name the cluster's folder, and that of its first process."""
    found = []
    for process in filter(lambda path: path.name.isdigit(), Path("/proc").iterdir()):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        if str(folder) in command or (int(process.name) == hub and "namespace_init.py" in command):
            found.append(command)
    return found


def _find_cgroups(folder: Path) -> list[Path]:
    return list(CGROUP_ROOT.glob(f"*/{Cluster(folder).cgroup}"))
