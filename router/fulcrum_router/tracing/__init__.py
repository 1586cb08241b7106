"""Traces of requests: which are sampled, and the spans of one."""
