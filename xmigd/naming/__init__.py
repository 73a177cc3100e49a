"""What is loaded into programs of others, so that their frameworks name optimizer state. Nothing of the daemon."""
