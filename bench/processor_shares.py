"""Gives each engine of a measurement its own share of a processor, as each would have its own GPU.

Without it all engines of a machine share its processors, and one more engine adds no
capacity. Control groups of the kernel do it, version 1 or 2, which needs root; they are made directly
under the root group, so that a limit on the bench's own group does not hold for the engines. The benches
`…_vllm` use it.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fulcrum_core.errors import InvalidInput

PERIOD_US = 10_000
"""A group that has used its share waits for the end of such a period. With 4 ms, three groups of 0.3 on one
processor got a tenth to a fifth less than that."""
SHARES_V1, WEIGHT_V2 = 335, 33
"""A third of the usual weight, that of niceness 5: the router and the load come first."""


class ProcessorShares:
    """The control groups of one run of a bench; `root` is where the kernel shows them."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._root = root
        self._groups: list[Path] = []

    def limit(self, name: str, processes: Iterable[int], share: float) -> None:
        """Limit these processes, with all their threads, to a share of one processor together.

        Raises:
            InvalidInput: if the kernel refuses, usually because this process does not run as root.
        """
        quota_us = str(int(share * PERIOD_US))
        try:
            group = self._make_group(name, quota_us)
            for process in processes:
                with suppress(ProcessLookupError):  # it has ended
                    (group / "cgroup.procs").write_text(str(process))
        except OSError as error:
            rule = f"must let this process make control groups ({error.strerror}): run it as root"
            raise InvalidInput("control groups", error.filename, rule) from error

    def _make_group(self, name: str, quota_us: str) -> Path:
        is_v2 = (self._root / "cgroup.controllers").exists()
        group = (self._root if is_v2 else self._root / "cpu") / f"fulcrum-bench-{os.getpid()}-{name}"
        if is_v2:
            (self._root / "cgroup.subtree_control").write_text("+cpu")
            settings = {"cpu.max": f"{quota_us} {PERIOD_US}", "cpu.weight": str(WEIGHT_V2)}
        else:
            settings = {
                "cpu.cfs_period_us": str(PERIOD_US),
                "cpu.cfs_quota_us": quota_us,
                "cpu.shares": str(SHARES_V1),
            }
        group.mkdir()
        self._groups.append(group)
        for setting, value in settings.items():
            (group / setting).write_text(value)
        return group

    def remove(self) -> None:
        """Remove the groups, whose processes have ended; say which could not be removed."""
        for group in self._groups:
            try:
                group.rmdir()
            except OSError as error:
                print(f"warning: {group} stays: {error.strerror}", file=sys.stderr)


@contextmanager
def processor_shares() -> Iterator[ProcessorShares]:
    """Remove the control groups at the end of the block."""
    shares = ProcessorShares()
    try:
        yield shares
    finally:
        shares.remove()
