"""Webhooks: events are sent to whoever an operator names, at least once, and signed."""
