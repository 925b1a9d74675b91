"""The batch of a train step: what of it is trained, and in which forward pass."""
