"""How an instance is laid over its devices, in how many bits it keeps what it holds, and why."""

from collections.abc import Iterator

from fulcrum_core.models import KvPrecision, WeightPrecision, format_gib, kv_bytes_per_token, weight_bytes
from fulcrum_operator.engines.launch import Choice
from fulcrum_operator.engines.launch_request import LaunchRequest


def layout_choices(request: LaunchRequest) -> Iterator[Choice]:
    """Its ranks, and what they hold of the experts."""
    layout, facts = request.layout, request.facts
    why = "as written" if request.parallelism.tensor else "every device of the instance shares each layer"
    yield Choice("tensor", str(layout.tensor), why)
    if layout.pipeline * layout.data > 1:
        yield Choice("pipeline × data", f"{layout.pipeline} × {layout.data}", "as written")
    if facts is not None and facts.is_moe and layout.devices_needed > 1:
        held = "some experts" if layout.expert else "a slice of each expert"
        yield Choice("expert", str(layout.expert).lower(), f"of {facts.experts}, every rank holds {held}")


def precision_choices(request: LaunchRequest) -> Iterator[Choice]:
    """Weights and KV, and the memory that they take of the whole instance."""
    weights, kv, facts = request.quantization.weights, request.quantization.kv_cache, request.facts
    if facts is None:
        for name, value in (("weights", weights.value), ("kvCache", kv.value)):
            yield Choice(name, value, "the model is not known" if value == "auto" else "as written")
        return
    kept = facts.quantization or facts.dtype
    size = format_gib(weight_bytes(facts, weights))
    if weights is WeightPrecision.AUTO:
        yield Choice("weights", kept, f"as the checkpoint has them: {size}")
    else:
        yield Choice("weights", weights.value, f"as written, the checkpoint has {kept}: {size}")
    token = f"{kv_bytes_per_token(facts, kv):,} bytes a token"
    if kv is KvPrecision.AUTO:
        yield Choice("kvCache", facts.dtype, f"what the model computes in: {token}")
    else:
        yield Choice("kvCache", kv.value, f"as written: {token}")
