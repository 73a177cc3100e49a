"""Long work: written down before it begins, watched, waited for, cancelled, and resolved after a restart."""
