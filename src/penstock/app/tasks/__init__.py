"""What a task does with its share of a batch, in whatever process it runs."""
