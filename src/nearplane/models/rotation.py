"""Rotation of the residual stream of a network, which computes the same with weights that are easier to quantize.

Every block reads the stream through a norm and adds to it. With an orthogonal matrix R, weights W that read behind a norm of
weights g become `W diag(g) R`, weights that add to it `R^T W`, and norms 1, as `rms(x R) = rms(x)`. Large columns are then spread
over all columns of a group that share a step. Only the head may multiply the last norm: tied embeddings cannot be rotated.
(QuaRot: Ashkboos et al. 2024.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.errors import ModelError, first_few
from nearplane.system.safetensors_files import TensorReader

STRIP = 2048  # rows that are rotated at a time
SIGNS = 20240330  # seed of the signs, which make large numbers of equal sign add up nowhere
BLOCK = r"(?P<block>(?:.+\.)?layers\.\d+)\."
EXPERT = r"(?:experts\.\d+\.|shared_experts?\.)?"
READS = "reads", "input_layernorm"
READS_MLP = "reads", "post_attention_layernorm"
ROLES: dict[
    str, tuple[str, str]
] = {  # by pattern of a stored name: what becomes of it, and the norm before it in the block
    rf"{BLOCK}self_attn\.(?:[qkv]|qkv)_proj\.weight": READS,
    rf"{BLOCK}mlp\.(?:{EXPERT}(?:gate|up|gate_up)_proj|gate|shared_expert_gate)\.weight": READS_MLP,
    rf"{BLOCK}block_sparse_moe\.(?:gate|experts\.\d+\.w[13])\.weight": READS_MLP,
    rf"{BLOCK}self_attn\.o_proj\.(?:weight|bias)": ("adds", ""),
    rf"{BLOCK}(?:mlp\.{EXPERT}down_proj|block_sparse_moe\.experts\.\d+\.w2)\.(?:weight|bias)": ("adds", ""),
    rf"{BLOCK}(?:input|post_attention)_layernorm\.weight": ("norm", ""),
    rf"{BLOCK}self_attn\.(?:(?:[qkv]|qkv)_proj\.bias|[qk]_norm\.weight|rotary_emb\.inv_freq)": ("stays", ""),
    rf"{BLOCK}mlp\.{EXPERT}(?:gate|up|gate_up)_proj\.bias": ("stays", ""),
    r"(?:.+\.)?embed_tokens\.weight": ("embeds", ""),
    r"(?:model\.)?norm\.weight": ("norm", ""),
    r"lm_head\.weight": ("head", ""),
}
LAST_NORM = r"(?:model\.)?norm\.weight"


class Role(NamedTuple):
    """What becomes of a tensor.

    Args:
        kind: "norm", "embeds" for that of embeddings, "reads" the stream, "adds" to it, or "stays".
        norm: Stored name of the weights of the norm whose outputs it multiplies; empty if there is none.
    """

    kind: str
    norm: str = ""


def roles_of(reader: TensorReader) -> dict[str, Role]:
    """Return what becomes of every tensor of a model, by stored name.

    Raises:
        ModelError: A tensor is of no known kind, or the head or the last norm is missing.
    """
    names = reader.names()
    last = [name for name in names if re.fullmatch(LAST_NORM, name)]
    if len(last) != 1 or "lm_head.weight" not in names:
        found = (
            f"{first_few(last) or 'no norm.weight'} and {'an' if 'lm_head.weight' in names else 'no'} lm_head.weight"
        )
        raise ModelError(
            f"Found {found} in {reader.folder}; a rotation needs one norm.weight before an lm_head.weight. Quantize the model as "
            f"it is."
        )
    roles, unknown = dict[str, Role](), list[str]()
    for name in names:
        match, role = next(
            ((m, role) for pattern, role in ROLES.items() if (m := re.fullmatch(pattern, name))), (None, None)
        )
        if match is None or role is None:
            unknown.append(name)
        elif role[0] == "head":
            roles[name] = Role("reads", last[0])
        else:
            roles[name] = Role(role[0], f"{match['block']}.{role[1]}.weight" if role[1] else "")
    unknown += [role.norm for role in roles.values() if role.norm and role.norm not in roles]
    if unknown:
        raise ModelError(
            f"It is not known how {first_few(unknown)} of {reader.folder} takes part in a rotation. Quantize the model as it is."
        )
    return roles


def rotated_tensors(reader: TensorReader, roles: dict[str, Role]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the rotated network in their dtypes, in the order of the files."""
    for name in reader.names():
        tensor, (kind, norm) = reader.read([name])[name], roles[name]
        if kind == "stays":
            yield name, tensor
            continue
        if kind == "norm":
            yield name, torch.ones_like(tensor)
            continue
        factors = reader.read([norm])[norm] if norm else None
        changed = torch.empty_like(tensor)
        if kind == "adds":  # all columns of the tensor, or a bias, are hidden states
            source, target = (
                tensor.T if tensor.dim() > 1 else tensor[None],
                changed.T if tensor.dim() > 1 else changed[None],
            )
        else:
            source, target = tensor, changed
        for a in range(0, len(source), STRIP):  # so that little is in float32 at a time
            wide = source[a : a + STRIP].to(torch.promote_types(tensor.dtype, torch.float32))
            target[a : a + STRIP] = rotated(wide if factors is None else wide * factors.to(wide))
        yield name, changed


def rotated(x: Tensor) -> Tensor:
    """Return (..., n) `x R` with R = diag(signs) (Q kron H), H the largest Hadamard matrix whose size divides n, Q of cosines."""
    n = x.shape[-1]
    size = n & -n
    signs = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(SIGNS)).to(x) * 2 - 1
    parts = (x * signs).unflatten(-1, (n // size, size))
    width = 1
    while width < size:
        one, other = parts.unflatten(-1, (size // (2 * width), 2, width)).unbind(-2)
        parts = torch.stack([one + other, one - other], -2).flatten(-3)
        width *= 2
    turned: Tensor = torch.einsum("...ik,ij->...jk", parts / math.sqrt(size), cosines(n // size).to(x))
    return turned.flatten(-2)


def cosines(m: int) -> Tensor:
    """Return (m, m) float64 orthogonal matrix of the discrete cosine transform."""
    i, j = torch.arange(m, dtype=torch.float64)[:, None], torch.arange(m, dtype=torch.float64)
    Q = torch.cos(math.pi * (2 * j + 1) * i / (2 * m)) * math.sqrt(2 / m)
    Q[0] /= math.sqrt(2)
    return Q
