"""Sources for real systems, each a class and a script."""
