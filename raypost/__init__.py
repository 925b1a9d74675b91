"""raypost: post-train language models by reinforcement learning, every role a Ray actor."""

__version__ = "0.1.0"
