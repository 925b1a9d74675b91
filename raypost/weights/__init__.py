"""Weights as bytes: what a version consists of, and what its parameters are called."""
