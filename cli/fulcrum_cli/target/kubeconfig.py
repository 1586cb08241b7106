"""Which cluster a kubeconfig means: only what has to be said about it; connecting is the adapter's.

Several files in KUBECONFIG are read as kubectl does: of each name the first one counts.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fulcrum_core.errors import InvalidInput

DEFAULT_KUBECONFIG = Path("~/.kube/config")


@dataclass(frozen=True, slots=True)
class KubeContext:
    """One context: what it is called, where its API server is, and the namespace it prefers."""

    name: str
    server: str
    namespace: str


def kubeconfig_files(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """The files that exist of those that KUBECONFIG names, without it of the usual one."""
    paths = [Path(part) for part in environment.get("KUBECONFIG", "").split(os.pathsep) if part]
    return tuple(path for path in paths or [DEFAULT_KUBECONFIG.expanduser()] if path.is_file())


def read_context(files: Sequence[Path], name: str | None) -> KubeContext:
    """The context of that name, without one the current context.

    Raises:
        InvalidInput: if a file cannot be read, or there is no such context.
    """
    documents = [_read(path) for path in files]
    source = os.pathsep.join(map(str, files))
    contexts, clusters = (
        _index_by_name(documents, "contexts", "context"),
        _index_by_name(documents, "clusters", "cluster"),
    )
    current = next((str(found) for doc in documents if (found := doc.get("current-context"))), None)
    chosen = name or current
    if chosen is None:
        raise InvalidInput("kubeconfig", source, "has no current context: choose one with --context")
    if chosen not in contexts:
        path = "--context" if name else f"{source}: current-context"
        known = ", ".join(sorted(contexts)) or "none"
        raise InvalidInput(path, chosen, f"is not a context of {source}; it has {known}")
    context = contexts[chosen]
    cluster = clusters.get(str(context.get("cluster")))
    if cluster is None or not cluster.get("server"):
        raise InvalidInput(f"{source}: context {chosen}", context.get("cluster"), "names no cluster of it")
    return KubeContext(chosen, str(cluster["server"]), str(context.get("namespace") or "default"))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput("--kubeconfig", path, "must be a file that exists") from None
    except OSError as error:
        raise InvalidInput("kubeconfig", path, f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError):
        raise InvalidInput("kubeconfig", path, "is not YAML") from None
    if not isinstance(document, dict):
        raise InvalidInput("kubeconfig", path, "is no kubeconfig")
    return document


def _index_by_name(
    documents: Sequence[Mapping[str, Any]], group: str, item: str
) -> dict[str, Mapping[str, Any]]:
    """The entries of one list of all files by name, the first of each."""
    found: dict[str, Mapping[str, Any]] = {}
    for document in documents:
        for entry in document.get(group) or ():
            if isinstance(entry, dict) and isinstance(entry.get(item), dict):
                found.setdefault(str(entry.get("name")), entry[item])
    return found
