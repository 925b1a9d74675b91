"""The audit: recounts a run from the files that it left, and says which of them contradict each other."""
