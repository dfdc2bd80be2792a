"""The Kafka engine: streams as topics, commits as transactions."""
