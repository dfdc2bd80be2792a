"""From stored batches to what readers get."""
