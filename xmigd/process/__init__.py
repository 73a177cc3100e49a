"""The machines that decide what becomes of a process: events in, instructions out, no I/O, no clock.

One direction of imports: `machine` → `migration`, `recovery` → `core` → `events`. The supervisor carries events to them
and does what they say.
"""
