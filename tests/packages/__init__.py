"""Tests of what `make built-packages` builds."""
