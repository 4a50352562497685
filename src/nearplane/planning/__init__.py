"""Decisions before the first layer: checks of the request, bits of each layer, memory and time."""
