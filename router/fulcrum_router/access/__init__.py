"""Who sends a request: API keys, trusted proxies, tenants and tiers.

`data_path.downstream` asks for each request. Callers of the state port are `control.auth`'s.
"""
