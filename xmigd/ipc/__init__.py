"""What the daemon, its servers and their programs tell each other, and the descriptors that go with it."""
