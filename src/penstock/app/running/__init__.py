"""Running an app: queries, their positions, and who runs them."""
