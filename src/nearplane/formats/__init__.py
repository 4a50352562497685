"""Layers and checkpoints as bytes on disk, one file a format."""
