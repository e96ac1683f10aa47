"""A demonstration that needs nothing but a CPU: tiny random checkpoints, engines in child processes, one table."""
