"""What every engine is made of."""
