"""Processes that communicate: how the ranks of a communicator find each other."""
