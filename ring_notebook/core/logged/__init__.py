"""What ranks log: numbers of a local batch, also those that come from a device."""
