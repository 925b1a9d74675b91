"""The language model as the trainer sees it: from token ids to logprobs, its adapters, its average."""
