"""What every room of Fulcrum shares and nothing else: kinds, domain values, latency models, ports."""
