"""The demo: a training run whose GPU server is made to fail again and again, beside one that is left in peace."""
