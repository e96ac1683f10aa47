"""What benchmarks/policies.py is made of: traces, baselines, the replay, plots."""
