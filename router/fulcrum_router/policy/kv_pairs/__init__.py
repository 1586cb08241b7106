"""The pairs of instances between which KV moves, and the leases of that KV.

Pure. `kv_transfer` records here, and dispatch, journeys and metrics read.
"""
