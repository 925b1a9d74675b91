"""Data: sources of prompts, the tokenizer, and the sampler that makes groups of them and saves its position."""
