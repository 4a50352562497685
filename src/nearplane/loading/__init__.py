"""Finished checkpoints as networks again: transformers, packed layers, the rehearsal of a reader."""
