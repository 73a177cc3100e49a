"""The daemon's hands: sockets, descriptors, processes. What to do is decided in xmigd.process."""
