"""The algorithm of a train step: advantages, losses and corrections, as pure functions."""
