"""Packing of running jobs onto fewer devices, live: plans, and what applies them."""
