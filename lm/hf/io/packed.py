"""Reads folders with matrices quantised to fp8 or mxfp4, as the largest open models are published, as bf16 matrices."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lm.errors import CheckpointError, ConfigError
from lm.hf.io.files import Files
from lm.storage.checkpoint import require_finite


class Packing(Protocol):
    """A way to store a quantised tensor X."""

    dtypes: ClassVar[tuple[torch.dtype, ...]]
    endings: ClassVar[tuple[str, ...]]
    """What stands behind X in the names of the tensors that it is stored as."""

    def unpacked(self, parts: list[Tensor]) -> Tensor:
        """Returns X in float32. Raises RuntimeError for shapes that do not fit each other."""


@dataclass(frozen=True)
class Fp8Blocks:
    """X (out, in) in float8, with a scale for each block of rows x columns; blocks at the edges may be smaller (DeepSeek-V3,
    arXiv:2412.19437, 3.3)."""

    rows: int
    columns: int
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float8_e4m3fn, torch.float32)
    endings: ClassVar[tuple[str, ...]] = ("", "_scale_inv")

    def unpacked(self, parts: list[Tensor]) -> Tensor:
        q, scale = parts
        rows, columns = q.shape
        if scale.shape != (-(-rows // self.rows), -(-columns // self.columns)):
            raise RuntimeError(f"blocks of {self.rows} x {self.columns} of {tuple(q.shape)} have not {tuple(scale.shape)} scales")
        return q.float() * scale.repeat_interleave(self.rows, 0)[:rows].repeat_interleave(self.columns, 1)[:, :columns]


class Mxfp4:
    """X (e, in, out) as numbers of 4 bits, two a byte, and an exponent for each 32 inputs of an output (gpt-oss; the Open Compute Project's
    Microscaling Formats, version 1.0)."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8, torch.uint8)
    endings: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")
    values: ClassVar[list[float]] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

    def unpacked(self, parts: list[Tensor]) -> Tensor:
        blocks, exponents = parts  # (e, out, in / 32, 16), (e, out, in / 32)
        both = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # the first of two is in the lower bits
        codes = torch.tensor(self.values + [-value for value in self.values])
        found = torch.ldexp(codes[both.int()], exponents.unsqueeze(-1).int() - 127)
        return found.flatten(-2).mT


def packing_of(said: object, where: str) -> Packing:
    """Returns the packing of a config.json's quantization_config. Raises ConfigError for one that is not supported."""
    config = said if isinstance(said, dict) else {}
    method, block = config.get("quant_method"), config.get("weight_block_size")
    if method == "mxfp4":
        return Mxfp4()
    if method == "fp8" and isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        return Fp8Blocks(*block)
    found = f"quantization_config is set, quant_method={str(method)[:40]!r}"
    raise ConfigError(f"{where}: {found}, and mxfp4 and fp8 with a weight_block_size are read. Use the unquantised model.")


class PackedFiles(Files):
    """The tensors of a folder, unpacked, by the names that they have unquantised."""

    def __init__(self, folder: Path, packing: Packing) -> None:
        super().__init__(folder)
        self._packing = packing
        self._packed = {key.removesuffix(end) for key in self.names for end in filter(None, packing.endings) if key.endswith(end)}
        self.names = self._packed | {key for key in self.names if not key.endswith(tuple(filter(None, packing.endings)))}

    def read(self, key: str) -> Tensor:
        if key not in self._packed:
            return super().read(key)
        parts = [self.tensor(f"{key}{ending}") for ending in self._packing.endings]
        try:
            if any(part.dtype != dtype for part, dtype in zip(parts, self._packing.dtypes, strict=True)):
                raise RuntimeError(f"{', '.join(str(part.dtype) for part in parts)}")
            found = self._packing.unpacked(parts).to(torch.bfloat16)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{self._folder}: {key} is not packed as config.json says ({error}). Download the folder again."
            ) from None
        require_finite(key, found, str(self._folder), "Download the folder again")
        return found
