"""Moves, suspensions and resumptions of running programs: `machine` decides and does no I/O."""
