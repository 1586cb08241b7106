"""The router: sends the prefill and the decode of each request to an instance, and forwards the response.

`policy/` decides and is pure. `data_path/` serves requests on asyncio protocols (`http1/`), over the
instances of `fleet/`; `kv_transfer/` verifies KV transfers; `observe/` watches objects, pods and engines;
`control/` holds the state port, metrics, failover and background tasks.
"""
