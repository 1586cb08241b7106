"""A machine of a test cluster: a set of namespaces, known by its first process.

When that process ends, the kernel ends every process, mount and interface in the set, so there is no list of
things to clean up and nothing stays after a crash of the tests.
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

# What the kubelet would write for the whole machine; nodes see these values in files of their own.
KERNEL_SETTINGS = {
    "vm-overcommit_memory": 1,
    "vm-panic_on_oom": 0,
    "kernel-panic": 10,
    "kernel-panic_on_oops": 1,
}
_NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET


class Machine:
    """The hub or a node; made by `boot`, or taken up again from the id of its first process."""

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
        """Starts a set of namespaces; `die_with_parent`: it ends when the calling thread ends, however that
        ends."""
        fd = [] if listener is None else [str(listener.fileno())]
        command = [
            *(["setpriv", "--pdeathsig", "KILL"] if die_with_parent else []),
            *("unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *(sys.executable, "-I", str(HERE / "namespace_init.py"), *fd),
        ]
        with log.open("wb") as out:  # never our own stderr: a pipe that reads it would stay open
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
            # Private copies of what programs write to by default, so that nodes need no paths of their own.
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
        """The command line that runs another one on this machine."""
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
        """Runs a program to its end and gives its output; RuntimeError with what it said if it fails."""
        done = subprocess.run(self.build_command(*arguments), env=build_environment(), capture_output=True)
        if done.returncode:
            error = done.stderr.decode() or done.returncode
            raise RuntimeError(f"{self.name}: {' '.join(map(str, arguments))}: {error}")
        return done.stdout.decode()

    def run_shell(self, *lines: str) -> str:
        """Runs lines of shell that all must succeed."""
        return self.run("sh", "-euc", "\n".join(lines))

    def start(self, log: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """Starts a program that stays; its output is added to the log."""
        with log.open("ab") as out:
            process = subprocess.Popen(
                self.build_command(*arguments), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=build_environment(), start_new_session=True,
            )  # fmt: skip
        self._children.append(process)
        return process

    @contextlib.contextmanager
    def enter_network(self) -> Iterator[None]:
        """This thread, and what it starts, use the machine's network: pod and service addresses."""
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self.pid}/ns/net") as inside:
            _set_network_namespace(inside.fileno())
            try:
                yield
            finally:
                _set_network_namespace(before.fileno())

    def is_alive(self) -> bool:
        """Whether the first process is there, and is still ours."""
        with contextlib.suppress(FileNotFoundError):
            return b"namespace_init.py" in Path(f"/proc/{self.pid}/cmdline").read_bytes()
        return False

    def kill(self) -> None:
        """A power cut: everything on the machine ends at once."""
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)
            wait_for(lambda: not self.is_alive(), f"{self.name} to end")
        for child in self._children:
            child.wait()


def find_innermost_child(pid: int) -> int:
    """The last in the line of only children that nsenter and unshare make."""
    with contextlib.suppress(FileNotFoundError):
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
    return pid


def find_parent(pid: int) -> int:
    """The process that started this one and waits for it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _set_network_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns from Python 3.12 on
    if libc.setns(descriptor, _NETWORK_NAMESPACE):
        raise OSError(ctypes.get_errno(), "setns")
