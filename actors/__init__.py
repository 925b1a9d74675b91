"""The roles of a run as plain classes; ray.remote is applied where they are spawned."""
