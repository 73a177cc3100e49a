"""A job's log: what the shim, the servers and the daemon have to say to its owner."""
