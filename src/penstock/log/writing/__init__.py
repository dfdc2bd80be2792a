"""From what users send to a commit."""
