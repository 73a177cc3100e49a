"""GPU servers, and the keepers of suspended processes, as the daemon starts, adopts and hears them."""
