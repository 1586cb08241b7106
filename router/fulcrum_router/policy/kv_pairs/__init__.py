"""The pairs of instances between which KV moves, and the leases of that KV."""
