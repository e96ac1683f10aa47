"""Decides: which token a prefix can be resumed at, what to load for it, what to keep. No I/O, no threads, no torch."""
