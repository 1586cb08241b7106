"""What a command speaks to. One rule, the same for all commands:

1. `--kubeconfig`, `--context` or `-n` mean a cluster, and so does being called as `kubectl fulcrum`;
2. else a local run that is up, if there is one;
3. else the kubeconfig (KUBECONFIG, or ~/.kube/config);
4. else, inside a pod, the cluster that it runs in.

Every answer says which one it was.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fulcrum_cli.target.kubeconfig import DEFAULT, kubeconfig_files, read_context
from fulcrum_cli.terminal.program import PLUGIN, PROGRAM, program_name
from fulcrum_core.errors import FulcrumError, InvalidInput

if TYPE_CHECKING:
    from fulcrum_cli.local.run_folder import RunInfo

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options that choose a target, as typed."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    program: str = PROGRAM

    @property
    def cluster(self) -> bool:
        """Whether a cluster is meant, whatever runs on this machine."""
        return self.program == PLUGIN or any((self.kubeconfig, self.context, self.namespace))


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """Services that run on this machine, the latest first."""

    runs: "tuple[RunInfo, ...]"

    @property
    def services(self) -> tuple[str, ...]:
        """Their names, each once, sorted."""
        return tuple(sorted({run.service for run in self.runs}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTarget:
    """One namespace of a cluster. `store` is the address that the adapter opens."""

    store: str
    namespace: str
    context: str
    server: str

    def __str__(self) -> str:
        return f"{self.context} ({self.server}), namespace {self.namespace}"


Target = LocalTarget | ClusterTarget


def asked(kubeconfig: Path | None, context: str | None, namespace: str | None) -> Asked:
    """The options of this call of the program."""
    return Asked(kubeconfig=kubeconfig, context=context, namespace=namespace, program=program_name())


def choose_target(wanted: Asked, environment: Mapping[str, str] = os.environ) -> Target:
    """The one target that the options mean.

    Raises:
        InvalidInput: if the options name what does not exist, or there is nothing to speak to.
    """
    if not wanted.cluster:
        from fulcrum_cli.local import find_runs

        if runs := find_runs():
            return LocalTarget(runs)
    return _cluster(wanted, environment)


def _cluster(wanted: Asked, environment: Mapping[str, str]) -> ClusterTarget:
    files = (wanted.kubeconfig.expanduser(),) if wanted.kubeconfig else kubeconfig_files(environment)
    if files:
        context = read_context(files, wanted.context)
        path = files[0] if wanted.kubeconfig else ""
        target = ClusterTarget(
            store=f"kubeconfig:{path}" + (f"#{wanted.context}" if wanted.context else ""),
            namespace=wanted.namespace or context.namespace,
            context=f"context {context.name}",
            server=context.server,
        )
    elif "KUBERNETES_SERVICE_HOST" in environment and not wanted.context:
        target = _in_cluster(wanted, environment)
    else:
        raise InvalidInput("target", "none", _nothing(wanted, environment))
    _need_extra()
    return target


def _in_cluster(wanted: Asked, environment: Mapping[str, str]) -> ClusterTarget:
    file = _ACCOUNT / "namespace"
    own = file.read_text(encoding="utf-8").strip() if file.is_file() else "default"
    return ClusterTarget(
        store="in-cluster",
        namespace=wanted.namespace or own,
        context="the cluster around this pod",
        server=f"https://{environment['KUBERNETES_SERVICE_HOST']}",
    )


def _nothing(wanted: Asked, environment: Mapping[str, str]) -> str:
    named = environment.get("KUBECONFIG")
    without = f"KUBECONFIG ({named}) names no file" if named else f"there is no {DEFAULT}"
    if wanted.cluster:
        return f"was found: {without}; --kubeconfig names a file"
    return (
        f"was found: no service runs on this machine (fulcrum up -f FILE --local starts one) and {without} "
        "(--kubeconfig names a file)"
    )


def _need_extra() -> None:
    if importlib.util.find_spec("kubernetes") is None:
        raise FulcrumError(
            "what speaks to a cluster is not installed: make cli, in Fulcrum's clone, brings it"
        )
