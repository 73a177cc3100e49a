"""The ranks of jobs: what each does and waits for, and what befell all of them together."""
