"""The instances of the service: endpoint, role, health and pending KV transfers."""
