"""Linear layer with the decoded integers of an entropy-coded matrix on the CPU, in 4 or 8 bits; see `words_linear.py`.

    y = row_scale * (codes @ (column_scale * x)) + bias

Columns take 4 bits if nearly all of their codes lie in -8 ... 7, others 8. Other codes are patches: values of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.coding.packed_matrix import PackedMatrix
from nearplane.compiled import compiled
from nearplane.loading import product_cpu
from nearplane.loading.product_cpu import BLOCK
from nearplane.loading.words_linear import WordsLinear, by_block, dense_dtype

Integers = npt.NDArray[np.int32]

MAX_PATCHED = 0.01  # share of the codes of a column that may be patches, so that the others take 4 bits


class CodedLinear(WordsLinear):
    """Layer of an entropy-coded matrix, without a bias.

    Args:
        packed: The decoded matrix, on the CPU.
        dtype: Dtype of `weight`.

    Attributes:
        words_4, words_8: The codes as `product_cpu` reads them, of the columns that take 4 and 8 bits.
        columns_4, columns_8: (places,) int32 column of each code of a row; any where a place has none.
        scale_4, scale_8: (places,) scales of these columns, float32 seen as int32; 0 where a place has none, or only codes 0:
            products are rounded relative to 8 steps, and the steps of a layer of zeros may be of any size.
        steps: Scales of rows, see `by_block`.
        patch_rows, patch_columns: (patches,) int32 places of patches, ordered by row.
        patch_bits: (patches,) their values, float32 seen as int32.
    """

    steps: Tensor
    patch_rows: Tensor
    patch_columns: Tensor
    patch_bits: Tensor

    def __init__(self, packed: PackedMatrix, dtype: torch.dtype) -> None:
        super().__init__(packed.shape, dtype)
        codes, counts = np.empty(packed.shape, np.int8), np.zeros(packed.shape[1], np.int32)
        groups = np.array(packed.groups, np.int64).reshape(-1, 5)
        _unpack(np.asarray(packed.codes), groups, np.argsort(packed.orders.rows), codes, counts)
        narrow = counts <= MAX_PATCHED * len(codes)
        rows, at = packed.patches.rows, np.argsort(packed.orders.columns)[packed.patches.columns]
        patched = codes[rows, at] + packed.patches.delta
        np.subtract.at(counts, at, np.abs(codes[rows, at] + 0.5) > 8)
        codes[rows, at] = 0
        found = np.empty(counts[narrow].sum(), np.int64)
        _outside(codes, narrow, found)
        more, there = np.divmod(found, self.in_features)
        rows, at = np.concatenate([rows, more]), np.concatenate([at, there])
        patched = np.concatenate([patched, codes[more, there]])
        codes[more, there] = 0
        filled = np.count_nonzero(codes, axis=0) > 0
        for bits, chosen in ((4, narrow), (8, ~narrow)):
            used = np.flatnonzero(chosen)
            used = np.append(used, np.full(-len(used) % (32 // bits), -1))
            columns = np.where(used < 0, 0, packed.orders.columns[used])
            scale = np.where((used >= 0) & filled[used], packed.scales.column_scale[columns], 0).astype(np.float32)
            self.register_buffer(f"words_{bits}", product_cpu.pack(codes, bits, used), persistent=False)
            self._keep({f"columns_{bits}": columns, f"scale_{bits}": scale.view(np.int32)})
        by_row = np.argsort(rows, kind="stable")
        rows, columns = rows[by_row], packed.orders.columns[at[by_row]]
        values = (
            patched[by_row].astype(np.float32) * packed.scales.row_scale[rows] * packed.scales.column_scale[columns]
        )
        self._keep({"patch_rows": rows, "patch_columns": columns, "patch_bits": values.view(np.int32)})
        self.register_buffer("steps", by_block(torch.from_numpy(packed.scales.row_scale)[:, None]), persistent=False)

    def product(self, x: Tensor) -> Tensor:
        """Return the product (rows, outputs) with the codes."""
        y, none = x.new_zeros(len(x), len(self.steps) * BLOCK), self.steps[:, :0]
        for bits, words, columns, scale in self._parts():
            product_cpu.product(x.index_select(1, columns).mul_(scale), words, self.steps, none, bits, y)
        patches = self.patch_rows.numpy(), self.patch_columns.numpy(), self.patch_bits.view(torch.float32).numpy()
        _add_patches(x.contiguous().numpy(), *patches, y.numpy())
        return y

    def by_strips(self, x: Tensor) -> Tensor:
        """Return the product (rows, outputs) of inputs of any dtype, on any device.

        Inputs are multiplied by the scales of columns, but in float64, where values are those that the file stands for.
        """
        if x.dtype == torch.float64:
            return super().by_strips(x)
        wide, dtype = x.float(), dense_dtype() if x.dtype == torch.bfloat16 and x.is_cpu else torch.float32
        parts = [
            (bits, words.cpu(), (wide.index_select(1, columns) * scale).to(dtype))
            for bits, words, columns, scale in self._parts()
        ]
        steps, sums = self.steps.cpu(), []
        for a in range(0, len(steps), count := torch.get_num_threads()):
            of = slice(a, a + count)
            values = (product_cpu.values(words[of], steps[of], steps[of, :0], bits) for bits, words, _ in parts)
            strips = (each.to(x.device, dtype) for each in values)
            products = [part @ strip for (_, _, part), strip in zip(parts, strips, strict=True)]
            sums.append(torch.stack(products).float().sum(0))
        patches = wide.index_select(1, self.patch_columns) * self.patch_bits.view(torch.float32)
        return torch.cat(sums, dim=1).index_add_(1, self.patch_rows, patches).to(x.dtype)

    def strips(self) -> Iterator[Tensor]:
        """Yield decoded (in, outputs) values."""
        steps, rows = self.steps.cpu(), self.patch_rows.cpu()
        columns_of, values = self.patch_columns.cpu().long(), self.patch_bits.cpu().view(torch.float32)
        for a in range(0, len(steps), count := torch.get_num_threads()):
            b = min(a + count, len(steps))
            strip = torch.zeros(self.in_features, (b - a) * BLOCK)
            for bits, words, columns, scale in self._parts():
                part = product_cpu.values(words.cpu()[a:b], steps[a:b], steps[a:b, :0], bits)
                used = scale.cpu().nonzero()[:, 0]
                part_of = part.index_select(0, used).mul_(scale.cpu()[used, None])
                strip[columns.cpu()[used].long()] = part_of
            first, last = torch.searchsorted(rows, torch.tensor([a * BLOCK, b * BLOCK], dtype=rows.dtype)).tolist()
            strip[columns_of[first:last], rows[first:last].long() - a * BLOCK] = values[first:last]
            yield strip

    def _parts(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield bits, words, columns and scales of the columns with 4 and with 8 bits, if there are any."""
        for bits in (4, 8):
            if (words := getattr(self, f"words_{bits}")).numel():
                scale = getattr(self, f"scale_{bits}").view(torch.float32)
                yield bits, words, getattr(self, f"columns_{bits}"), scale

    def _keep(self, arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            array = np.ascontiguousarray(array, np.int32)
            self.register_buffer(name, torch.from_numpy(array), persistent=False)


@compiled(error_model="numpy")
def _unpack(
    packed: npt.NDArray[np.uint8],
    groups: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
    codes: npt.NDArray[np.int8],
    counts: Integers,
) -> None:  # pragma: no cover
    """Write the codes of every row; count in each column those outside of 4 bits."""
    for row in range(len(codes)):
        line = codes[row]
        for group in range(len(groups)):
            start, stop, nibbles, first, width = groups[group]
            part = packed[first + order[row] * width : first + (order[row] + 1) * width]
            if nibbles:
                for j in range((stop - start) // 2):
                    line[start + 2 * j] = np.int8(part[j] & 15) - np.int8(8)
                    line[start + 2 * j + 1] = np.int8(part[j] >> 4) - np.int8(8)
                if (stop - start) % 2:
                    line[stop - 1] = np.int8(part[width - 1] & 15) - np.int8(8)
            else:
                for j in range(width):
                    line[start + j] = np.int8(part[j])
        for column in range(len(line)):
            counts[column] += np.uint8(line[column] + 8) > 15


@compiled(error_model="numpy")
def _outside(
    codes: npt.NDArray[np.int8], narrow: npt.NDArray[np.bool_], found: npt.NDArray[np.int64]
) -> None:  # pragma: no cover
    """Write the places, row times columns plus column, of the codes outside of 4 bits in narrow columns."""
    count, width = 0, codes.shape[1]
    for row in range(len(codes)):
        for column in range(width):
            if narrow[column] and np.uint8(codes[row, column] + 8) > 15:
                found[count] = row * width + column
                count += 1


@compiled(error_model="numpy")
def _add_patches(
    x: product_cpu.Floats, rows: Integers, columns: Integers, values: product_cpu.Floats, y: product_cpu.Floats
) -> None:  # pragma: no cover
    """Add the products of patches to y (rows of x, outputs)."""
    for row in range(len(x)):
        for patch in range(len(rows)):
            y[row, rows[patch]] += x[row, columns[patch]] * values[patch]
