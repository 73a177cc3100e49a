"""The REST API under /v1. Handlers are thin: the supervisor acts, the database remembers."""
