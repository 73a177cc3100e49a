"""Networks of jobs of several nodes: namespaces with addresses of the job's own, joined by the daemons' peers."""
