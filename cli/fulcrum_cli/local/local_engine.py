"""Which engines a local run starts: simulated ones, unless the manifest or `--engine` says otherwise.

In a cluster a manifest without `engine.type` runs vLLM. This machine has no GPU for it. `up`, `play` and
every local run change the manifest with it before anything is started.
"""

from enum import StrEnum
from typing import Any

from fulcrum_core.api import PDService, parse_object
from fulcrum_core.api.meta import Resource

TINY_MODEL = "tiny-model"
"""Name of the model that `make engine` creates in the engine environment."""

_ENGINE_SPECIFIC_FIELDS = ("hardware", "parallelism", "quantization", "settings", "template")
_FIELDS_OF_SIMULATED_ENGINES = ("profile",)
"""Fields of `engine` that a simulated engine understands; the others are a real engine's."""


class LocalEngine(StrEnum):
    """Values of `--engine`."""

    SIMULATED = "simulated"
    VLLM_CPU = "vllm-cpu"


def replace_engine(obj: Resource, engine: LocalEngine) -> Resource:
    """Return a PDService with this engine instead of its own, without the fields of its own engine.

    vLLM for CPUs serves the tiny model. Other objects are returned unchanged.
    """
    if not isinstance(obj, PDService):
        return obj
    if engine is LocalEngine.SIMULATED:
        return _with_simulated_engines(obj)
    document = _without_engine_specific_fields(obj)
    document["spec"].pop("modelSource", None)
    document["spec"] |= {"engine": {"type": "vLLM"}, "model": TINY_MODEL}
    return parse_object(document)


def simulate_unless_named(obj: Resource) -> Resource:
    """Return a PDService whose manifest does not name an engine type with simulated engines.

    Every other object is returned unchanged.
    """
    names_type = isinstance(obj, PDService) and "type" in obj.spec.engine.model_fields_set
    return obj if names_type or not isinstance(obj, PDService) else _with_simulated_engines(obj)


def _with_simulated_engines(service: PDService) -> Resource:
    document = _without_engine_specific_fields(service)
    engine = document["spec"]["engine"]
    kept = {name: engine[name] for name in _FIELDS_OF_SIMULATED_ENGINES}
    document["spec"]["engine"] = {"type": "Simulated", **kept}
    return parse_object(document)


def _without_engine_specific_fields(service: PDService) -> dict[str, Any]:
    document: dict[str, Any] = service.dump()
    spec = document["spec"]
    for part in (spec, *spec.get("pools", ())):
        for name in _ENGINE_SPECIFIC_FIELDS:
            part.pop(name, None)
    return document
