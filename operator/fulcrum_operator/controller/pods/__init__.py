"""The engine and model reader pods of a cluster: creation, observation, role probes and deletion."""
