"""The GPUs of a host: what they are, how they are linked, and who leases them."""
