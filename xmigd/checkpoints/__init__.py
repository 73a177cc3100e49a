"""A job's whole state, kept apart from the job: it can be restored when the job, its servers and the node are gone."""
