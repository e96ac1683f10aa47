"""Keeps: bytes in, bytes out. Knows no attention type, no vLLM, no torch."""
