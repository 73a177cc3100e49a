"""SQLite: models, one writer thread, readers. Schema history: migrations/."""
