"""Engines, workloads and load without GPUs: one engine model, in virtual time and behind vLLM's HTTP API."""
