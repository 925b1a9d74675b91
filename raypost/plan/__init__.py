"""The plan: what a configuration asks of a cluster, what it means for production, and why it cannot work."""
