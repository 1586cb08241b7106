"""Spec of a service with user arguments: a short KV lease, smaller blocks, little memory.

`conftest.py` starts one such service; tests of expired leases and overwritten blocks use it.
"""

import json

LEASE_S = 2
BLOCK = 64
MAX_MODEL_LENGTH = 2048
KV_BYTES = 8 * 2**20
"""8,192 tokens: blocks of an expired lease are soon overwritten."""
KV_TRANSFER_CONFIG = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": LEASE_S},
}
ENGINE_ARGS = (
    *("--kv-cache-memory-bytes", str(KV_BYTES), "--max-model-len", str(MAX_MODEL_LENGTH)),
    *("--block-size", str(BLOCK), "--kv-transfer-config", json.dumps(KV_TRANSFER_CONFIG)),
)
SHORT_LEASE_SPEC = {
    "engine": {
        "type": "vLLM",
        "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}],
        "args": list(ENGINE_ARGS),
    }
}
