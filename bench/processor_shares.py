"""Gives each engine of a measurement its own share of a processor, as each would have its own GPU.

Without it all engines of a machine share its processors, and an engine more adds nothing to what they can do
together. Control groups of the kernel do it, version 1 or 2, which needs root. `policy_vllm` uses it.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fulcrum_core.errors import InvalidInput

PERIOD_US = 10_000
"""A group that has used its share waits for the end of such a period."""
_ROOT = Path("/sys/fs/cgroup")


class ProcessorShares:
    """The control groups of one run of a bench."""

    def __init__(self) -> None:
        self._groups: list[Path] = []

    def limit(self, name: str, threads: Iterable[int], share: float) -> None:
        """Limit the processes of these threads to a share of one processor, together.

        Raises:
            InvalidInput: if this process may not make control groups.
        """
        quota_us = str(int(share * PERIOD_US))
        try:
            group = self._make_group(name, quota_us)
            for thread in threads:
                with suppress(ProcessLookupError):  # it has ended
                    (group / "cgroup.procs").write_text(str(thread))
        except OSError as error:
            raise InvalidInput("/sys/fs/cgroup", str(error), "must be writable: run this as root") from error

    def _make_group(self, name: str, quota_us: str) -> Path:
        is_v2 = (_ROOT / "cgroup.controllers").exists()
        group = (_ROOT if is_v2 else _ROOT / "cpu") / f"fulcrum-bench-{os.getpid()}-{name}"
        if is_v2:
            (_ROOT / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        self._groups.append(group)
        if is_v2:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(quota_us)
        return group

    def remove(self) -> None:
        """Remove the groups; their processes have ended."""
        for group in self._groups:
            with suppress(OSError):
                group.rmdir()


@contextmanager
def processor_shares() -> Iterator[ProcessorShares]:
    """Remove the control groups at the end of the block."""
    shares = ProcessorShares()
    try:
        yield shares
    finally:
        shares.remove()
