"""Tests of what `make packages` builds."""
