"""What a process says of itself: names of metrics, spans of what it did, and what it waits for now."""
