"""The command line of a test cluster, for a person who wants one to try things on.

python -m tools.kubernetes up --nodes 3        # then: export KUBECONFIG=…
python -m tools.kubernetes kubectl get nodes
python -m tools.kubernetes on n2 ctr -n k8s.io containers ls
python -m tools.kubernetes cut n3 | mend n3 | kill n3 | add n3
python -m tools.kubernetes down
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tools.kubernetes.cluster import Cluster
from tools.kubernetes.machine import Machine
from tools.kubernetes.program import Unavailable, cached, check_machine, environment, program


def main() -> None:
    """Runs one command; what is known of the cluster between two of them lies in its folder."""
    options = _parser().parse_args()
    try:
        if options.command == "check":
            check_machine()
        elif options.command == "program":
            print(cached())
        elif options.command == "build":
            _build()
        else:
            _on_cluster(Cluster(options.folder), options)
    except (Unavailable, RuntimeError, TimeoutError) as reason:
        sys.exit(f"error: {' '.join(str(reason).split())}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "kubernetes-for-tests")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say whether a cluster can run here")
    commands.add_parser("program", help="print where the program is, or will be once it is built")
    commands.add_parser("build", help="build the program, once, and print where it is")
    up = commands.add_parser("up")
    up.add_argument("--nodes", type=int, default=1)
    up.add_argument("--image", type=Path, action="append", default=[], help="archive to load into every node")
    commands.add_parser("status")
    commands.add_parser("down")
    for name in ("add", "cut", "mend", "kill"):
        commands.add_parser(name).add_argument("node")
    commands.add_parser("load").add_argument("image", type=Path)
    commands.add_parser("kubectl").add_argument("arguments", nargs=argparse.REMAINDER)
    on = commands.add_parser("on", help="run a command on a node, or on the hub")
    on.add_argument("node")
    on.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _build() -> None:
    if not cached().exists():
        print("building Kubernetes from source, once: five to ten minutes", file=sys.stderr, flush=True)
    print(program())


def _on_cluster(cluster: Cluster, options: argparse.Namespace) -> None:
    match options.command:
        case "up":
            cluster.start(options.nodes, archives=tuple(options.image), bound=False)
            print(f"export KUBECONFIG={cluster.kubeconfig}")
        case "status":
            machines = [cluster.hub, *cluster.nodes.values()]
            print(*(f"{m.name}\t{m.pid}\t{'up' if m.alive() else 'down'}" for m in machines), sep="\n")
        case "down":
            cluster.stop()
        case "add":
            cluster.add_node(options.node)
        case "cut":
            cluster.cut_cable(_node(cluster, options.node).name)
        case "mend":
            cluster.mend_cable(_node(cluster, options.node).name)
        case "kill":
            cluster.kill_node(_node(cluster, options.node).name)
        case "load":
            _load(cluster, options.image)
        case "kubectl":
            os.execv(program(), ["kubectl", f"--kubeconfig={cluster.kubeconfig}", *options.arguments])
        case "on":
            machine = cluster.hub if options.node == "hub" else _node(cluster, options.node)
            os.execvpe("nsenter", machine.command(*options.arguments), environment())


def _load(cluster: Cluster, archive: Path) -> None:
    if not archive.is_file():
        raise RuntimeError(f"{archive} is not there")
    if not cluster.hub.alive():
        raise RuntimeError(f"no cluster is up in {cluster.folder}")
    cluster.load_image(archive)


def _node(cluster: Cluster, name: str) -> Machine:
    if name not in cluster.nodes:
        raise RuntimeError(f"node {name} is not there; there are {', '.join(cluster.nodes) or 'none'}")
    return cluster.nodes[name]


if __name__ == "__main__":
    main()
