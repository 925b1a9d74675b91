"""Rollout: the pool of workers, and the vLLM engine that each of them runs."""
