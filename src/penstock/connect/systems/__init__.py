"""What sources and sinks of one system have in common."""
