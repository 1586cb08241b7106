"""Command line of a test cluster, to try something on a real Kubernetes.

python -m tools.kubernetes up --nodes 3        # then: export KUBECONFIG=…
python -m tools.kubernetes kubectl get nodes
python -m tools.kubernetes exec n2 ctr -n k8s.io containers ls
python -m tools.kubernetes disconnect n3 | reconnect n3 | kill n3 | add n3
python -m tools.kubernetes down
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tools.kubernetes.cluster import Cluster
from tools.kubernetes.machine import Machine
from tools.kubernetes.program import (
    ClusterUnavailable,
    build_environment,
    check_machine,
    ensure_program,
    locate_program,
)


def main() -> None:
    """Run one command. The cluster's state is in its folder, so the next command finds it."""
    options = _parser().parse_args()
    try:
        if options.command == "check":
            check_machine()
        elif options.command == "program":
            print(locate_program())
        elif options.command == "build":
            _build_program()
        else:
            _run_command(Cluster(options.folder), options)
    except (ClusterUnavailable, RuntimeError, TimeoutError) as reason:
        sys.exit(f"error: {' '.join(str(reason).split())}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "kubernetes-for-tests")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="check whether a cluster can run here")
    commands.add_parser("program", help="print the path of the program, built or not")
    commands.add_parser("build", help="build the program if necessary and print its path")
    up = commands.add_parser("up")
    up.add_argument("--nodes", type=int, default=1)
    up.add_argument("--image", type=Path, action="append", default=[], help="archive to load into every node")
    commands.add_parser("status")
    commands.add_parser("down")
    for name in ("add", "disconnect", "reconnect", "kill"):
        commands.add_parser(name).add_argument("node")
    commands.add_parser("load").add_argument("image", type=Path)
    commands.add_parser("kubectl").add_argument("arguments", nargs=argparse.REMAINDER)
    execute = commands.add_parser("exec", help="run a command on a node, or on the hub")
    execute.add_argument("node")
    execute.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _build_program() -> None:
    if not locate_program().exists():
        print("building Kubernetes from source, once: five to ten minutes", file=sys.stderr, flush=True)
    print(ensure_program())


def _run_command(cluster: Cluster, options: argparse.Namespace) -> None:
    match options.command:
        case "up":
            cluster.start(options.nodes, archives=tuple(options.image), die_with_parent=False)
            print(f"export KUBECONFIG={cluster.kubeconfig}")
        case "status":
            machines = [cluster.hub, *cluster.nodes.values()]
            print(*(f"{m.name}\t{m.pid}\t{'up' if m.is_alive() else 'down'}" for m in machines), sep="\n")
        case "down":
            cluster.stop()
        case "add":
            cluster.add_node(options.node)
        case "disconnect":
            cluster.disconnect_node(_find_node(cluster, options.node).name)
        case "reconnect":
            cluster.reconnect_node(_find_node(cluster, options.node).name)
        case "kill":
            cluster.kill_node(_find_node(cluster, options.node).name)
        case "load":
            _load_image(cluster, options.image)
        case "kubectl":
            os.execv(ensure_program(), ["kubectl", f"--kubeconfig={cluster.kubeconfig}", *options.arguments])
        case "exec":
            machine = cluster.hub if options.node == "hub" else _find_node(cluster, options.node)
            os.execvpe("nsenter", machine.build_command(*options.arguments), build_environment())


def _load_image(cluster: Cluster, archive: Path) -> None:
    if not archive.is_file():
        raise RuntimeError(f"file {archive} does not exist")
    if not cluster.hub.is_alive():
        raise RuntimeError(f"no cluster is up in {cluster.folder}")
    cluster.load_image(archive)


def _find_node(cluster: Cluster, name: str) -> Machine:
    if name not in cluster.nodes:
        raise RuntimeError(f"no node {name}; nodes: {', '.join(cluster.nodes) or 'none'}")
    return cluster.nodes[name]


if __name__ == "__main__":
    main()
