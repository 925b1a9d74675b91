"""Models: where they come from."""
