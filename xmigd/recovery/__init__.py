"""Deciding what to do when a server dies: `machine` decides and does no I/O; the supervisor does what it says."""
