"""GPU servers, and the holders of suspended processes, as the daemon starts, adopts and hears them."""
