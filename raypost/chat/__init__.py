"""Messages <-> token ids, and the record of a session: what was sent to the engine, and what it sampled."""
