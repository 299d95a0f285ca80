"""Which workers there are, and how loaded: kept in Redis, read by gateways."""
