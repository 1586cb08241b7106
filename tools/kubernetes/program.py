"""Builds the Kubernetes program (all components, etcd and kubectl in one) into a cache folder.

The program is kept, not the build: its folder is keyed by the version and by what it is made from, so two
checkouts and two test runs share it, and a changed source never meets an old program.

`cluster` asks for the program, and tests are skipped with the reason if `check_machine` refuses.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
KUBERNETES_VERSION = "v1.36.3"
REQUIRED_PROGRAMS = (
    "unshare",
    "nsenter",
    "setpriv",
    "mount",
    "ip",
    "iptables",
    "conntrack",
    "containerd",
    "ctr",
    "runc",
    "busybox",
)
CNI_PLUGIN_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))  # Debian's folder, everybody else's folder
CGROUP_ROOT = Path("/sys/fs/cgroup")


class ClusterUnavailable(Exception):
    """This machine cannot run a cluster; the message says why. Tests skip with it."""


def check_machine() -> None:
    """Raise ClusterUnavailable with the first reason why no cluster can run here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ClusterUnavailable("a test cluster needs Linux and root")
    if missing := [tool for tool in REQUIRED_PROGRAMS if not shutil.which(tool, path=build_search_path())]:
        raise ClusterUnavailable(
            f"a test cluster needs these programs: {', '.join(missing)}; tools/kubernetes/setup tries"
        )
    if not any(place.is_dir() for place in CNI_PLUGIN_FOLDERS):
        raise ClusterUnavailable("a test cluster needs the CNI plugins (Debian: containernetworking-plugins)")
    if not (CGROUP_ROOT / "memory").is_dir():
        raise ClusterUnavailable("a test cluster needs cgroup v1; cgroup v2 is not supported yet")
    if not locate_program().exists() and not find_go():
        raise ClusterUnavailable("a test cluster needs Go, to build Kubernetes (on PATH or in /usr/local/go)")


def locate_program() -> Path:
    """Return the path of the program, built or not."""
    sources = [HERE / name for name in ("go.mod", "go.sum", "main.go")]
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return _locate_cache() / f"{KUBERNETES_VERSION}-{key}" / "k8s"


def ensure_program() -> Path:
    """Return the Kubernetes program; the first call builds it in minutes. ClusterUnavailable without Go."""
    built = locate_program()
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with (_locate_cache() / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                _build_program(built)
    return built


def find_go() -> str | None:
    """Return the Go compiler from PATH or /usr/local/go, or None."""
    return shutil.which("go", path=f"{build_search_path()}:/usr/local/go/bin")


def build_search_path() -> str:
    """Return PATH with the folders of root's programs, which a user's PATH may not contain."""
    return os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"


def build_environment() -> dict[str, str]:
    """Return the environment of a cluster's programs: only PATH."""
    return {"PATH": build_search_path(), "HOME": "/root"}


def _locate_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kubernetes-for-tests"


def _build_program(target: Path) -> None:
    compiler = find_go()
    if compiler is None:
        raise ClusterUnavailable("a test cluster needs Go, to build Kubernetes (on PATH or in /usr/local/go)")
    _, minor, _ = KUBERNETES_VERSION.split(".")
    facts = {"gitVersion": KUBERNETES_VERSION, "gitMajor": "1", "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    stamps = [f"-X {package}.{name}={value}" for package in packages for name, value in facts.items()]
    unfinished = target.with_suffix(".unfinished")
    # The linker strips debug information anyway; not generating it saves a tenth of the time and 0.5 GB.
    flags = (
        "-trimpath",
        "-buildvcs=false",
        "-gcflags=all=-dwarf=false",
        f"-ldflags=-s -w {' '.join(stamps)}",
    )
    variables = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    subprocess.run([compiler, "build", *flags, "-o", unfinished, "."], cwd=HERE, env=variables, check=True)
    unfinished.rename(target)
