"""The operator's command line, for `program`: which namespaces, images and election. It starts nothing."""

import argparse
import json
from collections.abc import Set
from dataclasses import fields
from pathlib import Path
from typing import Any

from fulcrum_cluster.logs import add_log_level_option
from fulcrum_cluster.process import ANY_ADDRESS, ArgumentParser
from fulcrum_operator.engines.images import EngineImages
from fulcrum_operator.manifests.names import ServiceAccount

_ENGINE_IMAGE_KINDS = tuple(field.name for field in fields(EngineImages))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the operator's command line."""
    parser = ArgumentParser(prog="fulcrum_operator", description="Reconcile all PDServices of a cluster.")
    add = parser.add_argument
    add("--store", default="in-cluster", help="API server: in-cluster or kubeconfig:[PATH][#CONTEXT]")
    add("--namespace", default="", help="reconcile this namespace only (default: all)")
    add("--image", required=True, help="image of routers, and of engines without an image of their own")
    add("--image-pull-secret", action="append", default=[], help="pull secret of that image; may be repeated")
    add(
        "--engine-image",
        action="append",
        type=_parse_engine_image,
        default=[],
        help=f"default image of engines, as KIND=IMAGE; KIND is one of {', '.join(_ENGINE_IMAGE_KINDS)}",
    )
    add("--hub-endpoint", default="", help="HF_ENDPOINT of engines and model readers (default: the hub)")
    add("--lease-namespace", required=True, help="namespace of this operator and of its Lease")
    add("--identity", required=True, help="holder name in the Lease: the name of this pod")
    add(
        "--service-account",
        default="fulcrum-operator",
        help="ServiceAccount of the operator, and name of its Lease",
    )
    add(
        "--autoscaler-service-account",
        type=_parse_account,
        help="ServiceAccount of the autoscaler, as NAMESPACE:NAME",
    )
    add(
        "--token-file",
        type=Path,
        required=True,
        help="file with the token for the routers' state ports; read again for each request",
    )
    add(
        "--metrics-callers",
        type=_parse_peers,
        default=(),
        help="peers of a NetworkPolicy that may scrape engines, as a JSON list (default: none)",
    )
    add("--router-state", default=None, help="URL of routers' state ports, with {service} and {namespace}")
    add("--state-ca", type=Path, help="PEM file with the authorities of state ports with TLS")
    add("--router-replicas", type=int, default=2, help="routers for each service, one of which is active")
    add(
        "--router-resources",
        type=_parse_resources,
        default={},
        help="resources of the router containers, as JSON (default: none)",
    )
    add(
        "--router-template",
        type=_parse_template,
        default={},
        help="strategic merge patch of the router pods, as JSON (default: none)",
    )
    add_log_level_option(parser)
    add("--host", default=ANY_ADDRESS, help="address for /healthz, /readyz and /metrics (default: all)")
    add("--port", type=int, default=9093, help="port for /healthz, /readyz and /metrics; 0: any free port")
    return parser


def _parse_account(text: str) -> ServiceAccount:
    namespace, colon, name = text.partition(":")
    if not (namespace and colon and name):
        raise argparse.ArgumentTypeError(f"{text} is not NAMESPACE:NAME")
    return ServiceAccount(namespace, name)


def _parse_engine_image(text: str) -> tuple[str, str]:
    kind, equals, image = text.partition("=")
    if kind not in _ENGINE_IMAGE_KINDS or not (equals and image):
        raise argparse.ArgumentTypeError(f"{text} is not KIND=IMAGE with {', '.join(_ENGINE_IMAGE_KINDS)}")
    return kind, image


def _parse_peers(text: str) -> tuple[dict[str, Any], ...]:
    parsed = _parse_json(text)
    if not isinstance(parsed, list) or not all(isinstance(peer, dict) and peer for peer in parsed):
        raise argparse.ArgumentTypeError(f"{text} is not a list of NetworkPolicy peers as JSON")
    return tuple(parsed)


def _parse_resources(text: str) -> dict[str, Any]:
    return _parse_object(text, {"requests", "limits", "claims"}, "a container's resources")


def _parse_template(text: str) -> dict[str, Any]:
    return _parse_object(text, {"metadata", "spec"}, "a patch of a pod's metadata and spec")


def _parse_object(text: str, keys: Set[str], description: str) -> dict[str, Any]:
    parsed = _parse_json(text)
    if not isinstance(parsed, dict) or not parsed.keys() <= keys:
        raise argparse.ArgumentTypeError(f"{text} is not {description} as JSON")
    return parsed


def _parse_json(text: str) -> Any:
    """None: the text is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None
