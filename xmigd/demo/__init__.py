"""The demo: a training run whose GPU server is struck again and again, beside one that is left in peace."""
