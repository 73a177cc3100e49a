"""Devices that several jobs share: classes, turns, and rotation under pressure."""
