"""What a run waits for when it hangs: who is present, whom each waits for, and the chain to its root."""
