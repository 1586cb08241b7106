"""The path of a client request: read it, prefill on one instance, decode on another, forward the response.

Requests that need no prefill leg go to one engine (`pass_through`).
"""
