"""Selects the target of a command, by one rule for all commands:

1. a cluster, if `--kubeconfig`, `--context` or `-n` is given, or the program was called as `kubectl fulcrum`;
2. else a local run on this machine, if there is one;
3. else the kubeconfig (KUBECONFIG, or ~/.kube/config);
4. else, inside a pod, the cluster of this pod.

Every command prints its target.

`connection` then connects.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fulcrum_cli.program_name import KUBECTL_PLUGIN_NAME, PROGRAM_NAME, program_name
from fulcrum_cli.target.kubeconfig import DEFAULT_KUBECONFIG, kubeconfig_files, read_context
from fulcrum_core.errors import FulcrumError

if TYPE_CHECKING:
    from fulcrum_cli.local.run_folder import RunInfo

_SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The options that select a target, as typed."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    program: str = PROGRAM_NAME

    @property
    def means_cluster(self) -> bool:
        """Whether the options select a cluster even if a local run exists."""
        return self.program == KUBECTL_PLUGIN_NAME or any((self.kubeconfig, self.context, self.namespace))


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """The local runs on this machine, latest first."""

    runs: "tuple[RunInfo, ...]"

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the services, each once, sorted."""
        return tuple(sorted({run.service for run in self.runs}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTarget:
    """One namespace of a cluster. `store_address` is what `fulcrum_cluster` opens."""

    store_address: str
    namespace: str
    context: str
    server: str

    def __str__(self) -> str:
        return f"{self.context} ({self.server}), namespace {self.namespace}"


Target = LocalTarget | ClusterTarget


def make_target_options(kubeconfig: Path | None, context: str | None, namespace: str | None) -> TargetOptions:
    """Return the target options of this command line."""
    return TargetOptions(kubeconfig=kubeconfig, context=context, namespace=namespace, program=program_name())


def choose_target(options: TargetOptions, environment: Mapping[str, str] = os.environ) -> Target:
    """Return the target that the options select.

    Raises:
        InvalidInput: if an option names something that does not exist.
        FulcrumError: if there is neither a cluster nor a local run.
    """
    if not options.means_cluster:
        from fulcrum_cli.local.run_folder import find_runs

        if runs := find_runs():
            return LocalTarget(runs)
    return _choose_cluster(options, environment)


def _choose_cluster(options: TargetOptions, environment: Mapping[str, str]) -> ClusterTarget:
    files = (options.kubeconfig.expanduser(),) if options.kubeconfig else kubeconfig_files(environment)
    if files:
        context = read_context(files, options.context)
        path = files[0] if options.kubeconfig else ""
        target = ClusterTarget(
            store_address=f"kubeconfig:{path}" + (f"#{options.context}" if options.context else ""),
            namespace=options.namespace or context.namespace,
            context=f"context {context.name}",
            server=context.server,
        )
    elif "KUBERNETES_SERVICE_HOST" in environment and not options.context:
        target = _choose_own_cluster(options, environment)
    else:
        raise FulcrumError(_no_target_found(options, environment))
    _require_kubernetes_extra()
    return target


def _choose_own_cluster(options: TargetOptions, environment: Mapping[str, str]) -> ClusterTarget:
    file = _SERVICE_ACCOUNT_FOLDER / "namespace"
    own_namespace = file.read_text(encoding="utf-8").strip() if file.is_file() else "default"
    return ClusterTarget(
        store_address="in-cluster",
        namespace=options.namespace or own_namespace,
        context="the cluster of this pod",
        server=f"https://{environment['KUBERNETES_SERVICE_HOST']}",
    )


def _no_target_found(options: TargetOptions, environment: Mapping[str, str]) -> str:
    kubeconfig = environment.get("KUBECONFIG")
    cause = (
        f"KUBECONFIG ({kubeconfig}) names no existing file"
        if kubeconfig
        else f"{DEFAULT_KUBECONFIG} does not exist"
    )
    if options.means_cluster:
        return f"No cluster found: {cause}. Pass --kubeconfig."
    return (
        f"No cluster and no local run found: {cause}. "
        "Pass --kubeconfig, or start one with `fulcrum up --local`."
    )


def _require_kubernetes_extra() -> None:
    if importlib.util.find_spec("kubernetes") is None:
        raise FulcrumError("The Kubernetes client is not installed; run `make cli` in the clone of Fulcrum.")
