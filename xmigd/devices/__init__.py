"""The node's devices: what they are, what is used of them, and whether they take new processes."""
