"""Benchmarks: ratios measured in one run, against the limit and against peers."""
