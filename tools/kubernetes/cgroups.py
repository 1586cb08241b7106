"""The cgroups of a cluster: one folder a node under every controller, made and removed by name."""

import os
from pathlib import Path

from tools.kubernetes.program import CGROUP_ROOT

CPU_SHARES = 8 * 1024
"""Of the processors, where a process outside of any group has 1024."""


def create(name: str) -> None:
    """Makes the groups of that path under every controller of cgroup v1."""
    for controller in filter(Path.is_dir, CGROUP_ROOT.iterdir()):
        folder = controller
        for part in Path(name).parts:
            parent, folder = folder, folder / part
            folder.mkdir(exist_ok=True)
            for setting in (
                "cpuset.cpus",
                "cpuset.mems",
            ):  # empty in a new group, and then nothing may run in it
                if (folder / setting).exists():
                    (folder / setting).write_text((parent / setting).read_text())
    _set_cpu_shares(Path(name).parts[0])


def _set_cpu_shares(name: str) -> None:
    """All pods together would else count as much as one process outside, and starve on a busy machine."""
    shares = CGROUP_ROOT / "cpu" / name / "cpu.shares"
    if shares.exists():
        shares.write_text(str(CPU_SHARES))


def remove(name: str) -> bool:
    """Removes the groups bottom-up; OSError as long as a process is in one."""
    for controller in filter(Path.is_dir, CGROUP_ROOT.iterdir()):
        for folder, _, _ in os.walk(controller / name, topdown=False):
            Path(folder).rmdir()
    return True
