"""What is kept of jobs beside the database: snapshots, the journal between them, module images (decision 0014)."""
