"""Pushing into sinks, with two-phase commit."""
