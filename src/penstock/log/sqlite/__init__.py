"""The embedded engine: everything in one SQLite file."""
