"""Moves, suspensions, resumptions and drains, as operators ask for them."""
