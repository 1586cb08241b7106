"""Traces of requests: which are sampled, and the spans of one; and the access log."""
