"""What there is in a log: names, streams and tables, and how they may change."""
