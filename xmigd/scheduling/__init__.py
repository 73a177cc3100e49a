"""What schedulers request of jobs: to make room in time, and many of them at once."""
