"""Penstock and sinks as they listen: sockets around the state."""
