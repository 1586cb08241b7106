"""Limits of one router over all its clients: memory of requests and unsent responses, open connections.

The router's state holds them; `requests`, `downstream` and `continuation` take from them. The limits of one
request are those of `requests`, the limits of one connection those of `downstream`.

What a body costs is estimated before it is parsed. The estimates are checked against the memory that the
process really has: near the limit of its container little is accepted, so that the kernel does not end it.
"""

import os
import resource
from pathlib import Path
from typing import Final

from fulcrum_router.http1.json_limits import find_separators

MAX_HELD_BYTES: Final = 512 * 1024 * 1024
"""Most bytes of all clients, however much memory there is."""
MIN_HELD_BYTES: Final = 32 * 1024 * 1024
PROGRAM_BYTES: Final = 128 * 1024 * 1024
"""Memory of a router that holds no requests, with some thousand connections."""
HELD_SHARE: Final = 0.5
"""Share of the rest of the container's memory that requests may take; responses need theirs."""
MACHINE_SHARE: Final = 0.125
"""Share of the machine's memory that they may take if the container has no limit."""
LOW_MEMORY_SHARE: Final = 0.85
"""Share of the container's memory from which `SHORT_HELD_SHARE` applies."""
SHORT_HELD_SHARE: Final = 0.125
"""Share of the limit on held bytes that still is accepted while memory is short."""
LARGE_SHARE: Final = 0.75
"""Share of the limit that large bodies may take: they leave room for others."""
UNFINISHED_SHARE: Final = 0.5
"""Share of the limit for bodies that came in part: slow senders leave room for those that send at once."""
UNSENT_SHARE: Final = 0.5
"""Share of the limit for responses that clients have not read, besides the held bytes: if both had one limit,
waiting bodies of one client would cut off the responses of others.
"""
FEW_SHARE: Final = 0.0625
"""Share of the limit up to which values of bodies that are not large are not counted: these may take 12 times
as much memory as estimated without that count.
"""
LARGE_BODY_BYTES: Final = 65_536
KEPT_SHARE: Final = 0.125
"""Bytes that may be kept to continue broken streams, besides the held ones and as a share of their limit."""
TENANT_KEPT_SHARE: Final = 0.125
"""Share of the kept bytes that each tenant may take; one that takes more leaves as much free for another."""
MAX_CONNECTIONS: Final = 16_384
MAX_HANDSHAKES: Final = 512
"""TLS handshakes at the same time."""
_RESERVED_FILES: Final = 256 + MAX_HANDSHAKES
"""Open files that are not connections of requests."""

_COPIES = 3
"""A body, its texts when parsed, and the body of the leg that is being sent."""
_BYTES_PER_SEPARATOR = 64
"""Memory of one parsed value besides its text: the object, and its place in a list or dictionary."""


class RequestMemory:
    """Counts the bytes of clients that the router holds.

    Args:
        max_bytes: Limit of the bytes held.
        limit_bytes: Memory that the process may have; None: not limited.
    """

    __slots__ = (
        "_is_short",
        "held_bytes",
        "limit_bytes",
        "max_bytes",
        "refusals",
        "unfinished_bytes",
        "unsent_bytes",
    )

    def __init__(self, max_bytes: int = MAX_HELD_BYTES, *, limit_bytes: int | None = None) -> None:
        self.max_bytes, self.limit_bytes = max_bytes, limit_bytes
        self.held_bytes = self.unfinished_bytes = self.unsent_bytes = self.refusals = 0
        self._is_short = False

    def hold(self, size: int, *, body_bytes: int) -> bool:
        """Count `size` bytes more, of a body that has `body_bytes` so far with them.

        False, and nothing is counted, if that exceeds the limit.
        """
        held_bytes = self.held_bytes + size
        share = 1.0 if body_bytes <= LARGE_BODY_BYTES else LARGE_SHARE
        if held_bytes > self.max_bytes * (SHORT_HELD_SHARE if self._is_short else share):
            self.refusals += 1
            return False
        self.held_bytes = held_bytes
        return True

    def hold_unfinished(self, size: int) -> bool:
        """Count `size` held bytes as those of an incomplete body; False if these are too many."""
        if self.unfinished_bytes + size > self.max_bytes * UNFINISHED_SHARE:
            self.refusals += 1
            return False
        self.unfinished_bytes += size
        return True

    def hold_unsent(self, size: int) -> bool:
        """Count `size` bytes of a response that its client has not read; False if these are too many."""
        share = SHORT_HELD_SHARE if self._is_short else UNSENT_SHARE
        if self.unsent_bytes + size > self.max_bytes * share:
            self.refusals += 1
            return False
        self.unsent_bytes += size
        return True

    @property
    def holds_few(self) -> bool:
        """Whether so few bytes are held that a rough estimate of the next ones does."""
        return self.held_bytes <= FEW_SHARE * self.max_bytes

    @property
    def is_full(self) -> bool:
        """Whether no more bytes should be read from clients that wait for a response."""
        return self.held_bytes >= self.max_bytes

    def release(self, size: int) -> None:
        """Count `size` bytes less."""
        self.held_bytes -= size

    def check(self, process_bytes: int) -> None:
        """Accept little from now on if the process has nearly all the memory that it may have."""
        limit = self.limit_bytes
        self._is_short = limit is not None and process_bytes > LOW_MEMORY_SHARE * limit


class KeptBytes:
    """Counts what the router keeps of streams to continue them, so that it stays below `max_bytes`.

    A tenant may take more than its share as long as the share of another one is free: one tenant alone can
    use nearly all. Requests without a tenant may take all, since they cannot be distinguished.
    """

    __slots__ = ("_bytes_by_tenant", "kept_bytes", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.kept_bytes = max_bytes, 0
        self._bytes_by_tenant: dict[str, int] = {}

    def keep(self, size: int, *, tenant: str) -> bool:
        """Count `size` bytes more; False, and nothing is counted, if there is no room."""
        tenant_bytes = self._bytes_by_tenant.get(tenant, 0) + size
        if self.kept_bytes + size > self.max_bytes:
            return False
        share = TENANT_KEPT_SHARE * self.max_bytes
        if tenant and tenant_bytes > share and self.kept_bytes + size > self.max_bytes - share:
            return False
        self.kept_bytes += size
        self._bytes_by_tenant[tenant] = tenant_bytes
        return True

    def release(self, size: int, *, tenant: str) -> None:
        """Count `size` bytes less, that were kept for the same tenant."""
        self.kept_bytes -= size
        left = self._bytes_by_tenant.get(tenant, 0) - size
        if left > 0:
            self._bytes_by_tenant[tenant] = left
        else:
            self._bytes_by_tenant.pop(tenant, None)


def estimate_parsed_bytes(body: bytes, *, few_held: bool) -> int:
    """Estimate the memory that serving a request takes besides its body: it parsed, and the body of a leg.

    Values cost more than their bytes. They are counted in large bodies, and in all unless `few_held`: to
    count them takes as long as to parse a text.
    """
    copies = (_COPIES - 1) * len(body)
    if few_held and len(body) <= LARGE_BODY_BYTES:
        return copies + len(body)
    return copies + _BYTES_PER_SEPARATOR * len(find_separators(body))


def find_memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory in bytes that the process's container may have; None: not limited, or not known.

    The lowest limit of the process's cgroup and of those around it; `root` is that of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _read_limits(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _read_limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _read_limits(mount: Path, path: str, name: str) -> list[int]:
    """Read the limits of a cgroup and of those around it; in a container only `mount` may be there."""
    folder = mount / path.strip("/")
    found: list[int] = []
    while folder.is_relative_to(mount):
        try:
            text = (folder / name).read_text(encoding="ascii").strip()
        except OSError:
            text = ""
        if text.isdigit() and int(text) < _UNLIMITED_BYTES:
            found.append(int(text))
        folder = folder.parent
    return found


_UNLIMITED_BYTES = 1 << 60
"""Limits from here on mean that there is none (cgroup v1)."""


def compute_max_held_bytes(limit_bytes: int | None, *, machine_bytes: int) -> int:
    """Compute the limit on the bytes held, from the container's memory or else the machine's."""
    if limit_bytes is None:
        share = MACHINE_SHARE * machine_bytes
    else:
        share = HELD_SHARE * (limit_bytes - PROGRAM_BYTES)
    return int(min(max(share, MIN_HELD_BYTES), MAX_HELD_BYTES))


def make_request_memory() -> RequestMemory:
    """Make the memory of this process's requests, by what its container or machine has."""
    limit = find_memory_limit()
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return RequestMemory(compute_max_held_bytes(limit, machine_bytes=machine_bytes), limit_bytes=limit)


def read_process_bytes() -> int:
    """Read the memory of this process; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it, up to what `MAX_CONNECTIONS` needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * MAX_CONNECTIONS + _RESERVED_FILES
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def find_max_connections() -> int:
    """Connections of clients that the limit of open files allows: each may need one to an engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, (soft - _RESERVED_FILES) // 2))
