"""Transport of the REST API: sockets, the gate that every request passes, what handlers are given. No domain."""
