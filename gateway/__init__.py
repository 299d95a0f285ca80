"""The HTTP front of the cluster: takes requests in three APIs and runs them on pairs of workers."""
