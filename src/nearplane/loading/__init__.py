"""Loading of checkpoints as networks, packed or decoded, and the rehearsal of loading before a run."""
