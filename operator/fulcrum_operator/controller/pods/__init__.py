"""The engine and model reader pods of a cluster: created, observed, probed."""
