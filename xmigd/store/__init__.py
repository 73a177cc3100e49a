"""What is kept of jobs beside the database: cuts, the journal between them, module images. See docs/decisions/0014."""
