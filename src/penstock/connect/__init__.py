"""Connectors: sources and sinks as ordinary programs, with points of reference and two-phase
commit.
"""
