"""How long groups wait for what, in nanoseconds, and how often they try."""

from __future__ import annotations

GRACE = 60_000_000  # ns in which a rank may go on, so that it stops right behind a collective
PATIENCE = 50_000_000  # ns, from the first stop until all fit, at least: twice what it took lately, and twice as long
MOST_PATIENCE = 200_000_000  # after each time that it was not enough
LEAVE_PATIENCE = 300_000_000  # ns, likewise, of a round at which a rank leaves its server: it is wanted once
HOLD_PATIENCE = 2_000_000_000  # ns, until all have prepared: that hashes memory
SUSPEND_PATIENCE = 300_000_000_000  # ns, until all are suspended that are prepared for it, over several rounds:
SUSPEND_STOP_PATIENCE = 1_000_000_000  # ns, likewise PATIENCE
SUSPEND_HOLD_PATIENCE = 10_000_000_000  # ns, likewise HOLD_PATIENCE: as long as a device may take to come to rest
GATHER_PATIENCE = 5_000_000_000  # ns, until all members are to be suspended, if one is
NEVER = 1 << 62
# Where ranks do not come to the same place, they are sent on to it in so many rounds of so many.
TRIES, OF_ROUNDS = 3, 16
STUCK_PATIENCE = 2_000_000_000  # ns, that all ranks are stuck: whoever is no longer says so within a second
LOOK_AGAIN = 500_000_000  # ns: a collective may fail before the death that it failed of is seen
BETWEEN_ROUNDS = 10_000_000  # ns
FIRST_PAUSE = 100_000_000  # ns, after a round that was given up: it doubles each time
LAST_PAUSE = 2_000_000_000
FIRST_SHORT_PAUSE = 20_000_000  # ns, likewise, if a member refused before all stood still, which cost nothing
LAST_SHORT_PAUSE = 160_000_000
