"""Random problems for the fit of blocks in Triton, compared with `SuperFit` in torch on the same numbers in float64.

`interpreted_problems.py` runs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearplane.lattice.kernels_torch import State
from nearplane.lattice.solvers import round_to_nearest
from nearplane.lattice.superblock import SuperGrid
from nearplane.lattice.superblock_fit import SuperFit, fit_blocks
from nearplane.lattice.superfit_triton import fit_columns
from nearplane.number_formats import TYPES, BlockFormat, integers

FORMATS: dict[str, BlockFormat] = {name: kind for name, kind in TYPES.items() if kind.fit == "blocks"}
FORMATS["int3-g24-min"] = integers(3, 24, minimum=True)


def problem(seed: int) -> dict[str, Any]:
    """Return the sizes and kinds of a problem."""
    draw = torch.Generator().manual_seed(seed)

    def of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    return {
        "seed": seed, "kind": list(FORMATS)[seed % len(FORMATS)], "dtype": of("float32", "float64"),
        "storage": of("float16", "bfloat16"), "rows": of(1, 5, 17), "size": of(1.0, 2.0**10, 2.0**-10),
    }  # fmt: skip


def state_of(asked: dict[str, Any], dtype: torch.dtype) -> tuple[State, SuperGrid, SuperFit, int, int, Tensor]:
    """Return a state whose steps are off, its grid and fit, and the columns to fit with their `E H`."""
    draw, kind = torch.Generator().manual_seed(asked["seed"]), FORMATS[asked["kind"]]
    storage, n = getattr(torch, asked["storage"]), 2 * kind.columns
    W = 0.02 * asked["size"] * (torch.randn(asked["rows"], n, generator=draw) + 0.2)
    X = torch.randn(2 * n, n, generator=draw)
    H = (X.T @ X / len(X) + 0.02 * torch.eye(n)).to(dtype)
    matrix = round_to_nearest(W, fit_blocks(kind, W, torch.ones(n), storage))
    off = (matrix.grid.d * 1.1).to(storage).float()
    grid = matrix.grid.with_parts({"d": off}).to(dtype)
    W = W.to(dtype)
    E = W - grid.decode(matrix.codes)
    state = State(
        group=grid.group,
        codebook=grid.codebook,
        scale=grid.scale.T.clone(memory_format=torch.contiguous_format),
        zero=grid.zero.T.clone(memory_format=torch.contiguous_format),
        codes=matrix.codes.T.contiguous(),
        E=E.T.contiguous(),
        H=H,
        diagonal=H.diagonal(),
        gained=W.new_zeros(len(W)),
        fitted=W.new_zeros(len(W)),
        moved=torch.zeros((), dtype=torch.bool),
    )
    a, b = (kind.columns, n) if asked["seed"] % 2 or not kind.single else (0, n)
    return state, grid, SuperFit(grid, kind, storage), a, b, H[a:b] @ state.E


def solved(asked: dict[str, Any]) -> dict[str, Any]:
    """Fit some columns; return how many numbers differ from the torch form, and errors of E, E H and the loss."""
    dtype = getattr(torch, asked["dtype"])
    state, begin, fit, a, b, EH = state_of(asked, dtype)
    start = state.E.clone()
    fit_columns(fit.kind, fit.storage, fit.parts, state, EH, a)
    wide, begin_wide, twin, _, _, expected = state_of(asked, torch.float64)
    begun = wide.E.clone()
    twin.fit(wide, a, b, expected)
    grid = fit.grid(state, begin)
    values = grid.decode(state.codes.T).T
    scale = float((begin.decode(state.codes.T).abs().max()) + start.abs().max())
    losses = [((E.T.double() @ wide.H) * E.T).sum(1) for E in (begun, state.E.double())]
    weights = begun + begin_wide.decode(wide.codes.T).T
    zeros = 1e-5 * state.zero.abs()
    return {
        "unlike_torch": sum(int((fit.parts[name] != part).sum()) for name, part in twin.parts.items()),
        "numbers": sum(part.numel() for part in twin.parts.values()),
        "E": float((weights - values - state.E).abs().max()) / scale,
        "EH": float((state.H[a:b] @ state.E - EH).abs().max() / (wide.H.abs().max() * scale * len(begun))),
        "loss": float(((losses[1] - losses[0] - state.fitted) / losses[0]).abs().max()),
        "gained_less": float(((state.fitted - wide.fitted) / losses[0]).max()),
        "steps": int((state.scale != grid.scale.T).sum() + ((grid.zero.T - state.zero).abs() > zeros).sum()),
        "moved": bool(state.moved) == bool(wide.moved),
    }
