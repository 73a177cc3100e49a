"""Memory that the daemon holds for its processes: it outlives their servers, and the daemon."""
