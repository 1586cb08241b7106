"""Verification of KV transfers: by the response of each request, and by canaries on pairs without traffic."""
