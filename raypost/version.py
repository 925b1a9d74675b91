"""The version of raypost."""

__version__ = "0.1.0"
