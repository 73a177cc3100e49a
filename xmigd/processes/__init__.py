"""Programs with their servers, as callers see them."""
