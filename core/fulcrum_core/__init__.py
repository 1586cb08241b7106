"""Code that all rooms share: API kinds, domain values, latency models and ports. No I/O, no clock."""
