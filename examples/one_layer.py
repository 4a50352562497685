"""One layer, no model: quantize a matrix to 3 bits and see what the lattice says about it."""

import torch

from nearplane import GridScheme, quantize_matrix

generator = torch.Generator().manual_seed(0)
spectrum = torch.arange(1, 257) ** -0.8  # inputs of real layers are far from white
X = torch.randn(4096, 256, generator=generator) * spectrum @ torch.randn(256, 256, generator=generator)
W = torch.randn(64, 256, generator=generator)
H = (X.T @ X / len(X)).double()

for solver in ("round-to-nearest", "nearest-plane"):
    matrix, record = quantize_matrix(W, H, GridScheme(bits=3, group_size=64, symmetric=False, solver=solver))
    error = (X @ (W - matrix.decode()).T).square().sum() / (X @ W.T).square().sum()
    print(f"{solver:17s} relative output error {error:.5f} (record: {record.relative_loss:.5f})")
print(f"Babai's worst case {record.worst_case:.4f}, expected {record.expected:.4f}, found {record.damped_loss:.4f}")
print(f"(the worst case holds for rows that do not clip: here {100 * (1 - record.clipped_rows):.0f} % of them)")
