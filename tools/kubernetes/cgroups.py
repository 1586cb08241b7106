"""Creates and removes the cgroups of a cluster: one folder per node under each controller of cgroup v1.

`cluster` calls it; a node's kubelet puts its pods below. Limits are Kubernetes' own.
"""

import os
from pathlib import Path

from tools.kubernetes.program import CGROUP_ROOT

CPU_SHARES = 8 * 1024
"""CPU shares; a process outside of any group has 1024."""


def create(name: str) -> None:
    """Create the groups of this path under each controller of cgroup v1."""
    for controller in filter(Path.is_dir, CGROUP_ROOT.iterdir()):
        folder = controller
        for part in Path(name).parts:
            parent, folder = folder, folder / part
            folder.mkdir(exist_ok=True)
            for setting in (
                "cpuset.cpus",
                "cpuset.mems",
            ):  # empty in a new group, in which nothing can run until they are set
                if (folder / setting).exists():
                    (folder / setting).write_text((parent / setting).read_text())
    _set_cpu_shares(Path(name).parts[0])


def _set_cpu_shares(name: str) -> None:
    """Raise the CPU shares: otherwise all pods together count as one process and starve on a busy machine."""
    shares = CGROUP_ROOT / "cpu" / name / "cpu.shares"
    if shares.exists():
        shares.write_text(str(CPU_SHARES))


def remove(name: str) -> bool:
    """Remove the groups bottom-up; OSError while a process is in one of them."""
    for controller in filter(Path.is_dir, CGROUP_ROOT.iterdir()):
        for folder, _, _ in os.walk(controller / name, topdown=False):
            Path(folder).rmdir()
    return True
