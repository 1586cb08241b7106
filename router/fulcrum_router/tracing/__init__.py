"""Traces of requests: which are sampled, and the spans of one; and the access log.

The data path records here. Neither holds any text of a client.
"""
