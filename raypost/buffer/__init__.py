"""The replay buffer: groups by task and status, leases, ages, and the journal it comes back from."""
