"""A machine of a test cluster: a set of Linux namespaces, identified by its first process.

When that process ends, the kernel ends every process, mount and interface in the set. With `die_with_parent`
it ends with the thread that booted it, so also when the tests crash. The cluster creates the control groups
and chooses the log files.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tools.kubernetes.program import HERE, ClusterUnavailable, build_environment
from tools.kubernetes.waiting import wait_for

# Kernel settings that the kubelet would write for the whole host; hub and nodes get private files instead.
KERNEL_SETTINGS = {
    "vm-overcommit_memory": 1,
    "vm-panic_on_oom": 0,
    "kernel-panic": 10,
    "kernel-panic_on_oops": 1,
}
_NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET


class Machine:
    """The hub or a node; created by `boot`, or attached by the id of its first process."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._children: list[subprocess.Popen[bytes]] = []

    @classmethod
    def boot(
        cls,
        name: str,
        log: Path,
        *,
        inside: Self | None = None,
        listener: socket.socket | None = None,
        die_with_parent: bool = False,
    ) -> Self:
        """Start a set of namespaces.

        Args:
            inside: the hub, for a node: the node is created on it and ends with it.
            listener: a socket outside of the set; its connections are relayed to the API server.
            die_with_parent: end the set when the calling thread ends.
        """
        fd = [] if listener is None else [str(listener.fileno())]
        command = [
            *(["setpriv", "--pdeathsig", "KILL"] if die_with_parent else []),
            *("unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *(sys.executable, "-I", str(HERE / "namespace_init.py"), *fd),
        ]
        with log.open(
            "wb"
        ) as out:  # not this process's stderr: a reader of it would wait for the machine's end
            process = subprocess.Popen(
                inside.build_command(*command) if inside else command,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=out, pass_fds=[int(n) for n in fd],
                env=build_environment(), start_new_session=True,
            )  # fmt: skip
        assert process.stdout is not None
        with process.stdout:
            if not process.stdout.readline():
                raise ClusterUnavailable(f"no namespaces for {name}: exit status {process.wait()}")
        machine = cls(name, find_innermost_child(process.pid))
        machine._children.append(process)
        machine._configure()
        return machine

    def _configure(self) -> None:
        self.run_shell(
            # Private copies of what programs write to by default: all nodes use the same paths.
            "for d in /run /var/lib /var/log; do mount -t tmpfs -o mode=755 tmpfs $d; done",
            "mkdir /run/kubernetes /run/sysctl; ip link set lo up; echo 1 > /proc/sys/net/ipv4/ip_forward",
            f"echo {self.name} > /proc/sys/kernel/hostname",
            *(
                f"echo {value} > /run/sysctl/{key};"
                f"mount --bind /run/sysctl/{key} /proc/sys/{key.replace('-', '/')}"
                for key, value in KERNEL_SETTINGS.items()
            ),
        )

    def build_command(self, *arguments: str | Path) -> list[str]:
        """Return the command line that runs a command on this machine."""
        return [
            "nsenter",
            f"--target={self.pid}",
            "--mount",
            "--net",
            "--uts",
            "--pid",
            "--",
            *map(str, arguments),
        ]

    def run(self, *arguments: str | Path) -> str:
        """Run a program and return its output; RuntimeError with its messages if it fails."""
        done = subprocess.run(self.build_command(*arguments), env=build_environment(), capture_output=True)
        if done.returncode:
            error = done.stderr.decode() or done.returncode
            raise RuntimeError(f"{self.name}: {' '.join(map(str, arguments))}: {error}")
        return done.stdout.decode()

    def run_shell(self, *lines: str) -> str:
        """Run shell lines; each must succeed."""
        return self.run("sh", "-euc", "\n".join(lines))

    def start(self, log: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """Start a program in the background; its output is appended to the log."""
        with log.open("ab") as out:
            process = subprocess.Popen(
                self.build_command(*arguments), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=build_environment(), start_new_session=True,
            )  # fmt: skip
        self._children.append(process)
        return process

    @contextlib.contextmanager
    def enter_network(self) -> Iterator[None]:
        """Run this thread, and what it starts, in the machine's network while the block runs."""
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self.pid}/ns/net") as inside:
            _set_network_namespace(inside.fileno())
            try:
                yield
            finally:
                _set_network_namespace(before.fileno())

    def is_alive(self) -> bool:
        """Whether the first process exists and its id was not reused."""
        with contextlib.suppress(FileNotFoundError):
            return b"namespace_init.py" in Path(f"/proc/{self.pid}/cmdline").read_bytes()
        return False

    def kill(self) -> None:
        """Kill everything on the machine at once, like a power cut."""
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)
            wait_for(lambda: not self.is_alive(), f"{self.name} to end")
        for child in self._children:
            child.wait()


def find_innermost_child(pid: int) -> int:
    """Return the last process in the chain of single children that nsenter and unshare create."""
    with contextlib.suppress(FileNotFoundError):
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
    return pid


def find_parent(pid: int) -> int:
    """Return the parent's process id."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process have stopped after a signal."""
    states = [
        stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return all(state == "T" for state in states)


def _set_network_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns from Python 3.12 on
    if libc.setns(descriptor, _NETWORK_NAMESPACE):
        raise OSError(ctypes.get_errno(), "setns")
