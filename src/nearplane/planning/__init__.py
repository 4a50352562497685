"""Decisions before the first layer: checks of the request, a rehearsal of loading, bits of each layer, memory and time."""
