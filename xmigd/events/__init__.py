"""What happened, for whoever listens: a durable sequence, live and replayed."""
