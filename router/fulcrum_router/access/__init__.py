"""Who sends a request: API keys, trusted proxies, tenants and tiers."""
