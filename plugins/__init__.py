"""Strategy, callback and logger plugins for Lightning."""
