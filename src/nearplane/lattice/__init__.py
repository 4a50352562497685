"""Pure mathematics of quantization on a lattice: tensors in, tensors out. No files, models or configuration."""
