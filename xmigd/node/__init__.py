"""The node and its health."""
