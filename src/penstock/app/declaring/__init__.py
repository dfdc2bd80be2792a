"""Declaring an app: its parts as data, and the checks made on them."""
