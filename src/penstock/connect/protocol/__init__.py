"""The connector protocol without I/O: frames, and the state of each side."""
