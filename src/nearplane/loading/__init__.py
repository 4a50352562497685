"""Loading of checkpoints as networks, packed or decoded."""
