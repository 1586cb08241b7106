"""The service's instances: their load, health and pending KV transfers."""
