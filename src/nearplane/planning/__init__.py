"""Before the first layer: whether a run can be done, bits of each layer, memory."""
