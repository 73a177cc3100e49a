"""Daemons of several nodes know each other, and have links that lose, duplicate and reorder nothing."""
