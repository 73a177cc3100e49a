"""Leases of jobs in etcd, so that two controllers never move one job."""
