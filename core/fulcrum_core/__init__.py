"""Code that all rooms share: API kinds, domain values, latency models and ports. No clock, and no
I/O but the files of engine profiles.
"""
