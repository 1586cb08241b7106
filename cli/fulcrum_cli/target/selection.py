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

from fulcrum_cli.program_name import KUBECTL_PLUGIN_NAME, PROGRAM_NAME, program_name
from fulcrum_cli.target.kubeconfig import DEFAULT_KUBECONFIG, kubeconfig_files, read_context
from fulcrum_core.errors import FulcrumError, InvalidInput

if TYPE_CHECKING:
    from fulcrum_cli.local.run_folder import RunInfo

_SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The options that choose a target, as typed."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    program: str = PROGRAM_NAME

    @property
    def means_cluster(self) -> bool:
        """Whether a cluster is meant, whatever runs on this machine."""
        return self.program == KUBECTL_PLUGIN_NAME or any((self.kubeconfig, self.context, self.namespace))


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
    """One namespace of a cluster. `store_address` is what the adapter opens."""

    store_address: str
    namespace: str
    context: str
    server: str

    def __str__(self) -> str:
        return f"{self.context} ({self.server}), namespace {self.namespace}"


Target = LocalTarget | ClusterTarget


def make_target_options(kubeconfig: Path | None, context: str | None, namespace: str | None) -> TargetOptions:
    """The options of this call of the program."""
    return TargetOptions(kubeconfig=kubeconfig, context=context, namespace=namespace, program=program_name())


def choose_target(options: TargetOptions, environment: Mapping[str, str] = os.environ) -> Target:
    """The one target that the options mean.

    Raises:
        InvalidInput: if the options name what does not exist, or there is nothing to speak to.
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
        raise InvalidInput("target", "none", _no_target_found(options, environment))
    _require_kubernetes_extra()
    return target


def _choose_own_cluster(options: TargetOptions, environment: Mapping[str, str]) -> ClusterTarget:
    file = _SERVICE_ACCOUNT_FOLDER / "namespace"
    own_namespace = file.read_text(encoding="utf-8").strip() if file.is_file() else "default"
    return ClusterTarget(
        store_address="in-cluster",
        namespace=options.namespace or own_namespace,
        context="the cluster around this pod",
        server=f"https://{environment['KUBERNETES_SERVICE_HOST']}",
    )


def _no_target_found(options: TargetOptions, environment: Mapping[str, str]) -> str:
    kubeconfig = environment.get("KUBECONFIG")
    why = f"KUBECONFIG ({kubeconfig}) names no file" if kubeconfig else f"there is no {DEFAULT_KUBECONFIG}"
    if options.means_cluster:
        return f"was found: {why}; --kubeconfig names a file"
    return (
        f"was found: no service runs on this machine (fulcrum up -f FILE --local starts one) and {why} "
        "(--kubeconfig names a file)"
    )


def _require_kubernetes_extra() -> None:
    if importlib.util.find_spec("kubernetes") is None:
        raise FulcrumError(
            "what speaks to a cluster is not installed: make cli, in Fulcrum's clone, brings it"
        )
