"""vLLM: its command line, environment and volumes for one instance, or why it cannot run as asked. Pure."""

from fulcrum_operator.engines.vllm.launch import (
    IMAGE,
    POD_PLACEMENT,
    VERSION,
    build_launch,
    expected_identity_and_startup_s,
    model_folder,
    model_volume,
    plan_engine,
)

__all__ = [
    "IMAGE",
    "POD_PLACEMENT",
    "VERSION",
    "build_launch",
    "expected_identity_and_startup_s",
    "model_folder",
    "model_volume",
    "plan_engine",
]
