"""Jobs: what `xmigctl run` starts."""
