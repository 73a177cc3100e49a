"""Run time and peak memory of jobs, predicted from jobs that have ended (docs/prediction.md)."""
