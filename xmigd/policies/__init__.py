"""What operators set while the daemon runs; the settings are its defaults."""
