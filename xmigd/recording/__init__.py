"""What the supervisor wants remembered (xmigd/records.py), written down, counted and published."""
