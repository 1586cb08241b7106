"""The instances of the service: endpoint, role, health, engine metrics, KV transfers; and flip requests."""
