"""Drivers: what a run composes out of the actors, and the commands that start one."""
