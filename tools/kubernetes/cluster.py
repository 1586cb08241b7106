"""A real Kubernetes on one Linux machine, for tests: no docker, nothing added to the machine's network.

The *hub* is a set of namespaces with etcd and the control plane; it is also the router between the nodes.
Each *node* is a further set inside it with its own containerd, kubelet and kube-proxy, so a node can be
killed as by a power cut and its cable can be pulled. When the hub's first process ends, the kernel ends every
process, mount and interface of the cluster; only the cluster's folder (certificates, logs) and empty cgroups
are left, and `stop` removes the latter. Tests of levels 3 and 4, `bench` and `python -m tools.kubernetes`
start clusters with it.
"""

import hashlib
import json
import os
import signal
import socket
import string
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tools.kubernetes import cgroups, control_plane, images, pki
from tools.kubernetes.api import AdminApi
from tools.kubernetes.control_plane import API_ADDRESS, POD_CIDR
from tools.kubernetes.machine import Machine, find_innermost_child, find_parent, is_stopped
from tools.kubernetes.program import (
    CNI_PLUGIN_FOLDERS,
    HERE,
    build_environment,
    check_machine,
    ensure_program,
)
from tools.kubernetes.waiting import succeeds, wait_for

API_SERVER: Final = "kube-apiserver"


class Cluster:
    """A cluster with its state in a folder, so that another process can attach.

    `api_server` are additional flags of kube-apiserver, such as `etcd-compaction-interval`, and
    `controller_manager` those of kube-controller-manager; `audit` is an audit policy (YAML), whose log is
    `audit_log`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        api_server: Mapping[str, str] | None = None,
        controller_manager: Mapping[str, str] | None = None,
        audit: str = "",
    ) -> None:
        folder = folder.resolve()  # programs in the cluster start in another working folder
        if any(folder.is_relative_to(hidden) for hidden in ("/run", "/var/lib", "/var/log")):
            raise ValueError(f"{folder} is not visible inside a cluster; choose another folder")
        self.folder, self.logs, self.kubeconfig = folder, folder / "logs", folder / "kubeconfig"
        self.audit_log = self.logs / "audit.jsonl"
        self.cgroup = f"kubernetes-for-tests-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        self.nodes: dict[str, Machine] = {}
        self._hub: Machine | None = None
        self._flags, self._audit = dict(api_server or {}), audit
        self._controller_flags = dict(controller_manager or {})
        self._components: dict[str, int] = {}
        self._lock = threading.Lock()
        self._api = AdminApi(folder)
        if (folder / "state.json").exists():
            state = json.loads((folder / "state.json").read_text())
            self._hub = Machine("hub", state["hub"])
            self.nodes = {name: Machine(name, pid) for name, pid in state["nodes"].items()}
            self._components = dict(state["components"])

    @property
    def hub(self) -> Machine:
        """Machine of the control plane; RuntimeError if the cluster is not running."""
        if self._hub is None:
            raise RuntimeError(f"no cluster is up in {self.folder}")
        return self._hub

    def start(
        self,
        nodes: int,
        *,
        archives: tuple[Path, ...] = (),
        manifests: Path | None = None,
        die_with_parent: bool = True,
    ) -> None:
        """Start a control plane and `nodes` nodes n1, n2, …; 0 starts only the control plane.

        `archives`: images that every node loads. `manifests`: a file or folder that is applied before there
        are controllers, which look for new kinds every half a minute only. `die_with_parent`: the cluster
        ends when the
        calling thread ends. Raises ClusterUnavailable where no cluster can run.
        """
        check_machine()
        ensure_program()
        if self._hub and self._hub.is_alive():
            raise RuntimeError(f"a cluster is up in {self.folder}")
        self.nodes.clear()
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port: int = listener.getsockname()[1]
                self._hub = Machine.boot(
                    "hub", self.logs / "hub.log", listener=listener, die_with_parent=die_with_parent
                )
            self._write_state()
            self._write_certificates(port)
            images.build_pause_image(self.folder / "pause.tar")
            self._start_control_plane(manifests)
            self._start_dns()
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda i: self.add_node(f"n{i}", archives=archives), range(1, nodes + 1)))
            account = "/api/v1/namespaces/default/serviceaccounts/default"  # without it no pod is admitted
            wait_for(lambda: self.get(account)[0] == 200, "the default service account")
        except Exception as error:
            error.add_note(f"the logs are in {self.logs}")
            raise

    def stop(self) -> None:
        """Stop the cluster and remove everything but its folder; does nothing if it is not running."""
        self._api.close()
        for machine in filter(None, (self._hub, *self.nodes.values())):
            machine.kill()
        self._hub = None
        (self.folder / "state.json").unlink(missing_ok=True)
        wait_for(lambda: cgroups.remove(self.cgroup), "the cgroups to be empty")

    # -- nodes --

    def add_node(
        self, name: str, *, archives: tuple[Path, ...] = (), labels: Mapping[str, str] | None = None
    ) -> None:
        """Start a new node, or a killed one again, with an empty disk except for the images in `archives`."""
        number = int(name.removeprefix("n"))
        node = Machine.boot(name, self.logs / f"{name}.log", inside=self.hub)
        self._connect_node(node, number)
        self._write_node_files(name, number)
        node.run("mount", "--bind", self.folder / name, "/run/kubernetes")
        cgroups.create(f"{self.cgroup}/{name}")
        log = self.logs / name
        node.start(
            log.with_suffix(".containerd.log"), "containerd", "--config=/run/kubernetes/containerd.toml"
        )
        wait_for(lambda: bool(node.run("ctr", "version")), f"containerd of {name}")
        for image in (self.folder / "pause.tar", *archives):
            self._load_image(node, image)
        node.start(
            log.with_suffix(".kubelet.log"), ensure_program(), "kubelet",
            "--config=/run/kubernetes/kubelet.yaml",
            "--kubeconfig=/run/kubernetes/kubelet.kubeconfig",
            f"--node-ip=10.88.{number}.2", f"--cgroup-root=/{self.cgroup}/{name}",
            "--node-labels=" + ",".join(f"{key}={value}" for key, value in (labels or {}).items()),
        )  # fmt: skip
        node.start(
            log.with_suffix(".proxy.log"), ensure_program(), "kube-proxy",
            "--kubeconfig=/run/kubernetes/proxy.kubeconfig",
            "--proxy-mode=iptables", f"--cluster-cidr={POD_CIDR}", f"--bind-address=10.88.{number}.2",
            "--oom-score-adj=0",
            # 0: do not change the machine's settings.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
        )  # fmt: skip
        with self._lock:
            self.nodes[name] = node
            self._write_state()
        wait_for(lambda: self.is_ready(name), f"node {name} to be ready")
        wait_for(lambda: _connects(node, ("10.96.0.1", 443)), f"the first service to be reachable on {name}")

    def kill_node(self, name: str) -> None:
        """Kill the node, like a power cut; `add_node` with the same name starts it again."""
        with self._lock:
            self.nodes.pop(name).kill()
            self._write_state()

    def disconnect_node(self, name: str) -> None:
        """Disconnect the node from the control plane and from all other nodes."""
        self.hub.run("ip", "link", "set", name, "down")

    def reconnect_node(self, name: str) -> None:
        """Undo `disconnect_node`."""
        number = int(name.removeprefix("n"))
        self.hub.run_shell(
            f"ip link set {name} up", f"ip route replace 10.89.{number}.0/24 via 10.88.{number}.2"
        )

    def partition_nodes(self, one: str, other: str) -> None:
        """Disconnect two nodes from each other, in both directions; both reach all other machines."""
        self._change_partition("-I", one, other)

    def heal_partition(self, one: str, other: str) -> None:
        """Undo `partition_nodes`."""
        self._change_partition("-D", one, other)

    def _change_partition(self, change: str, one: str, other: str) -> None:
        for source, target in ((one, other), (other, one)):
            self.hub.run("iptables", "-w", change, "FORWARD", "-i", source, "-o", target, "-j", "DROP")

    def is_ready(self, name: str) -> bool:
        """Whether the node's condition Ready is True."""
        status, body = self.get(f"/api/v1/nodes/{name}")
        conditions = json.loads(body)["status"].get("conditions", ()) if status == 200 else ()
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def load_image(self, image: Path) -> None:
        """Load an image archive into each node."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: self._load_image(node, image), self.nodes.values()))

    def _load_image(self, node: Machine, image: Path) -> None:
        node.run("ctr", "--namespace=k8s.io", "images", "import", image.resolve())

    def _connect_node(self, node: Machine, number: int) -> None:
        name = node.name
        wait_for(
            lambda: not succeeds(self.hub.run, "ip", "link", "show", name),
            f"the old link of {name} to be removed",
        )
        with (
            self.hub.enter_network()
        ):  # not self.hub.run: the node's process id is valid only in this namespace
            link = ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid)]
            subprocess.run(link, env=build_environment(), check=True)
        self.hub.run("ip", "addr", "add", f"10.88.{number}.1/24", "dev", name)
        node.run_shell(
            f"ip addr add 10.88.{number}.2/24 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via 10.88.{number}.1",
        )
        self.reconnect_node(name)

    # -- the API --

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as administrator and return its output; RuntimeError with its messages if it fails."""
        command = [str(ensure_program()), "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def get(self, path: str) -> tuple[int, bytes]:
        """GET as administrator; return status and body. Cheaper than kubectl for polling."""
        return self.request("GET", path)

    def request(
        self, method: str, path: str, body: bytes = b"", *, content_type: str = "application/json"
    ) -> tuple[int, bytes]:
        """Send a request as administrator; return status and body. `content_type` is the request's."""
        return self._api.request(method, path, body, content_type=content_type)

    def read(self, path: str) -> Any:
        """Return an object or a list; LookupError if the status is not 200."""
        status, body = self.get(path)
        if status != 200:
            raise LookupError(f"{path}: {status} {body[:200]!r}")
        return json.loads(body)

    # -- faults of the control plane --

    def signal_component(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a component of the control plane: SIGSTOP makes it hang, SIGCONT resumes it.

        After SIGSTOP all its threads have stopped when this returns: until then it may still respond.
        """
        pid = self._components[name]
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            wait_for(lambda: is_stopped(pid), f"{name} to stop")
        if number == signal.SIGCONT:
            os.kill(find_parent(pid), number)  # nsenter stops itself when its child is stopped

    def kill_component(self, name: str) -> None:
        """Kill a component of the control plane; `start_component` starts it again on the same data."""
        pid = self._components.pop(name)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}/ns/pid").exists(), f"{name} to end")
        self._write_state()

    def start_component(self, name: str) -> None:
        """Start a killed component with its flags; if it is the API server, wait until it is ready."""
        self._start_component(name, self._build_flags(name))
        self._write_state()
        if name == API_SERVER:
            wait_for(lambda: self.get("/readyz")[0] == 200, "the API server")

    def _build_flags(self, name: str) -> dict[str, str]:
        certificates = self.folder / "pki"
        match name:
            case "etcd":
                return control_plane.build_etcd_flags()
            case "kube-apiserver":
                return control_plane.build_api_server_flags(
                    certificates, self._build_audit_flags() | self._flags
                )
            case "kube-scheduler":
                return control_plane.build_scheduler_flags(self.folder)
            case "kube-controller-manager":
                return control_plane.build_controller_manager_flags(self.folder) | self._controller_flags
        raise LookupError(f"the control plane has no component {name}")

    def _build_audit_flags(self) -> dict[str, str]:
        if not self._audit:
            return {}
        policy = self.folder / "audit.yaml"
        policy.write_text(self._audit)
        whole = {"audit-log-maxsize": "10000"}  # MB; the default would start another file at 100 MB
        return {"audit-policy-file": str(policy), "audit-log-path": str(self.audit_log), **whole}

    def _start_control_plane(self, manifests: Path | None) -> None:
        self._components.clear()
        self.hub.run("ip", "addr", "add", f"{API_ADDRESS}/32", "dev", "lo")
        self._start_component("etcd", self._build_flags("etcd"))
        self.start_component(API_SERVER)
        if manifests is not None:
            self.kubectl("apply", "--server-side", "-f", str(manifests))
        self.start_component("kube-scheduler")
        self.start_component("kube-controller-manager")

    def _start_component(self, name: str, flags: Mapping[str, str]) -> None:
        arguments = (f"--{flag}={value}" for flag, value in flags.items())
        process = self.hub.start(self.logs / f"{name}.log", ensure_program(), name, *arguments)
        wait_for(lambda: find_innermost_child(process.pid) != process.pid, f"{name} to start")
        self._components[name] = find_innermost_child(process.pid)

    def _start_dns(self) -> None:
        self.hub.start(
            self.logs / "dns.log", sys.executable, "-I", HERE / "dns.py", API_ADDRESS, self.folder / "pki"
        )
        self.kubectl("apply", "-f", "-", stdin=control_plane.DNS_SERVICE)

    # -- files --

    def _write_state(self) -> None:
        nodes = {name: node.pid for name, node in sorted(self.nodes.items())}
        state = {"hub": self.hub.pid, "nodes": nodes, "components": self._components}
        unfinished = self.folder / "state.json.unfinished"
        unfinished.write_text(json.dumps(state))
        unfinished.rename(self.folder / "state.json")

    def _write_certificates(self, port: int) -> None:
        folder = self.folder / "pki"
        folder.mkdir(exist_ok=True)
        ca = pki.create_authority("test-ca")
        front = pki.create_authority("test-front-proxy-ca")
        admin = pki.issue_certificate(ca, "admin", group="system:masters")
        names = (
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        )
        ca.write(folder, "ca")
        front.write(folder, "front-proxy-ca")
        admin.write(folder, "admin")
        pki.issue_certificate(front, "front-proxy-client").write(folder, "front-proxy-client")
        hosts = ("127.0.0.1", "localhost", API_ADDRESS, "10.96.0.1", *names)
        pki.issue_certificate(ca, "kube-apiserver", hosts=hosts).write(folder, "apiserver")
        pki.write_service_account_keys(folder)
        for name in ("kube-controller-manager", "kube-scheduler"):
            client = pki.issue_certificate(ca, f"system:{name}")
            (folder / f"{name}.kubeconfig").write_text(
                pki.build_kubeconfig(ca, client, "https://127.0.0.1:6443")
            )
        self.kubeconfig.write_text(pki.build_kubeconfig(ca, admin, f"https://127.0.0.1:{port}"))
        (self.folder / "port").write_text(str(port))

    def _write_node_files(self, name: str, number: int) -> None:
        folder, ca = self.folder / name, pki.read_certificate(self.folder / "pki", "ca")
        (folder / "cni").mkdir(parents=True, exist_ok=True)
        identity = pki.issue_certificate(
            ca, f"system:node:{name}", group="system:nodes", hosts=(name, f"10.88.{number}.2")
        )
        identity.write(folder, "node")
        (folder / "ca.crt").write_bytes(ca.certificate_pem())
        (folder / "kubelet.kubeconfig").write_text(
            pki.build_kubeconfig(ca, identity, f"https://{API_ADDRESS}:6443")
        )
        proxy = pki.issue_certificate(ca, "system:kube-proxy")
        (folder / "proxy.kubeconfig").write_text(
            pki.build_kubeconfig(ca, proxy, f"https://{API_ADDRESS}:6443")
        )
        values = {
            "pod_cidr": f"10.89.{number}.0/24",
            "cni_plugins": str(next(place for place in CNI_PLUGIN_FOLDERS if place.is_dir())),
        }
        for source, target in (
            ("containerd.toml", "containerd.toml"),
            ("kubelet.yaml", "kubelet.yaml"),
            ("cni.conflist", "cni/10.conflist"),
        ):
            (folder / target).write_text(string.Template((HERE / source).read_text()).substitute(values))


def _connects(machine: Machine, address: tuple[str, int]) -> bool:
    with machine.enter_network(), socket.create_connection(address, timeout=1):
        return True
