"""Rows of `fulcrum plan` on layout and precision: each value with its reason."""

from collections.abc import Iterator

from fulcrum_core.models import KvPrecision, WeightPrecision, format_gib, kv_bytes_per_token, weight_bytes
from fulcrum_operator.engines.launch import Choice
from fulcrum_operator.engines.launch_request import LaunchRequest


def layout_choices(request: LaunchRequest) -> Iterator[Choice]:
    """Rows for the ranks and the distribution of experts."""
    layout, facts = request.layout, request.facts
    why = (
        "set in the manifest"
        if request.parallelism.tensor
        else "every device of the instance shares each layer"
    )
    yield Choice("tensor", str(layout.tensor), why)
    if layout.pipeline * layout.data > 1:
        yield Choice("pipeline × data", f"{layout.pipeline} × {layout.data}", "set in the manifest")
    if facts is not None and facts.is_moe and layout.devices_needed > 1:
        share = "some experts" if layout.expert else "a slice of each expert"
        yield Choice("expert", str(layout.expert).lower(), f"of {facts.experts}, every rank has {share}")


def precision_choices(request: LaunchRequest) -> Iterator[Choice]:
    """Rows for the precision of weights and KV, with the memory they take in the whole instance."""
    weights, kv, facts = request.quantization.weights, request.quantization.kv_cache, request.facts
    if facts is None:
        for name, value in (("weights", weights.value), ("kvCache", kv.value)):
            yield Choice(name, value, "the model is not known" if value == "auto" else "set in the manifest")
        return
    kept = facts.quantization or facts.dtype
    size = format_gib(weight_bytes(facts, weights))
    if weights is WeightPrecision.AUTO:
        yield Choice("weights", kept, f"as the checkpoint has them: {size}")
    else:
        yield Choice("weights", weights.value, f"set in the manifest, the checkpoint has {kept}: {size}")
    token = f"{kv_bytes_per_token(facts, kv):,} bytes a token"
    if kv is KvPrecision.AUTO:
        yield Choice("kvCache", facts.dtype, f"the data type of the model: {token}")
    else:
        yield Choice("kvCache", kv.value, f"set in the manifest: {token}")
