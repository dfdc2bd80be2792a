"""What authors of connectors use."""
