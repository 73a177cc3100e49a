"""`xmigctl doctor`: what this node needs, what it has, and what to do about each difference.

`examine` runs every check. Checks read the node through `system.System`, so that tests can make one up; each is a
generator of findings and may not raise.
"""

from xmigd.doctor.checks import examine
from xmigd.doctor.system import Finding, State, System
from xmigd.doctor.trial import try_program

__all__ = ["Finding", "State", "System", "examine", "try_program"]
