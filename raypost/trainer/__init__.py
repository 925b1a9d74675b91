"""What one trainer rank computes: advantages, losses and corrections as pure functions, packing, the DeepSpeed step."""
