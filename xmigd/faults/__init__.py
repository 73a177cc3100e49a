"""Faults, and the recoveries from them."""
