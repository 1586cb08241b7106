"""Verification of KV transfers: by the response of each request, and by canaries on pairs without traffic.

The data path verifies and `server` runs the canaries; results are kept in `policy.kv_pairs`.
"""
