"""Spark's own Kafka source and sink."""
