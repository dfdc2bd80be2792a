"""Jobs for other engines; each runs in a virtual environment that the benchmark makes."""
