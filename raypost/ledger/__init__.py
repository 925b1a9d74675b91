"""The ledger: where every group is and why, as counts, as a journal, and as the life of one group."""
