"""Engines whose weights never change: the reference and reward models."""
