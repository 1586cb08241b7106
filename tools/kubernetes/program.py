"""The Kubernetes program: every part, etcd and kubectl in one, built from Go modules into a cache folder.

The program is kept, not the build: its folder is keyed by the version and by what it is made from, so two
checkouts and two test runs share it, and a changed source never meets an old program.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
KUBERNETES = "v1.36.3"
TOOLS = (
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
CNI_PLUGINS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))  # Debian's place, everyone else's place
CGROUPS = Path("/sys/fs/cgroup")


class Unavailable(Exception):
    """This machine cannot run a cluster; the message says why. Tests skip with it."""


def check_machine() -> None:
    """Raises Unavailable with the first reason why no cluster can run here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("a test cluster needs Linux and root")
    if missing := [tool for tool in TOOLS if not shutil.which(tool, path=search_path())]:
        raise Unavailable(
            f"a test cluster needs these programs: {', '.join(missing)}; tools/kubernetes/setup tries"
        )
    if not any(place.is_dir() for place in CNI_PLUGINS):
        raise Unavailable("a test cluster needs the CNI plugins (Debian: containernetworking-plugins)")
    if not (CGROUPS / "memory").is_dir():
        raise Unavailable("a test cluster needs cgroup v1: nobody has tried it on v2 yet")
    if not cached().exists() and not go():
        raise Unavailable("a test cluster needs Go, to build Kubernetes (on PATH or in /usr/local/go)")


def cached() -> Path:
    """Where the program is, or will be once it is built."""
    sources = [HERE / name for name in ("go.mod", "go.sum", "main.go")]
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return _cache() / f"{KUBERNETES}-{key}" / "k8s"


def program() -> Path:
    """The Kubernetes program, built on first use: minutes then, at once later. Unavailable without Go."""
    built = cached()
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with (_cache() / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                _build(built)
    return built


def go() -> str | None:
    """The Go compiler: on PATH, or where its own archive puts it."""
    return shutil.which("go", path=f"{search_path()}:/usr/local/go/bin")


def search_path() -> str:
    """PATH with the places where root's programs are, which a user's PATH may lack."""
    return os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"


def environment() -> dict[str, str]:
    """What the programs of a cluster get: nothing of the caller's but the path."""
    return {"PATH": search_path(), "HOME": "/root"}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kubernetes-for-tests"


def _build(target: Path) -> None:
    compiler = go()
    if compiler is None:
        raise Unavailable("a test cluster needs Go, to build Kubernetes (on PATH or in /usr/local/go)")
    _, minor, _ = KUBERNETES.split(".")
    facts = {"gitVersion": KUBERNETES, "gitMajor": "1", "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    stamps = [f"-X {package}.{name}={value}" for package in packages for name, value in facts.items()]
    unfinished = target.with_suffix(".unfinished")
    # The linker would strip debug information anyway: not making it saves a tenth of the time and 0.5 GB.
    flags = (
        "-trimpath",
        "-buildvcs=false",
        "-gcflags=all=-dwarf=false",
        f"-ldflags=-s -w {' '.join(stamps)}",
    )
    variables = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    subprocess.run([compiler, "build", *flags, "-o", unfinished, "."], cwd=HERE, env=variables, check=True)
    unfinished.rename(target)
