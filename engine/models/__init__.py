"""Model definitions: which ops run in which order, independent of the device."""
