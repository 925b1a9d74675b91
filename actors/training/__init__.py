"""Training: all ranks as one trainer, one rank, and the way of its weights to the engines."""
