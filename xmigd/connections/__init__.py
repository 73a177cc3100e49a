"""Who connects, how many connections each may have, and how long one may take."""
