"""The assumptions behind a plan's time and cost: the GPU, the part of its peak that training reaches (MFU), and its price."""

from typing import NamedTuple, Self

from pydantic import Field, model_validator

from lm.schema import Config


class GPU(NamedTuple):
    """What is known of a kind of GPU."""

    name: str  # words that the device name must contain; the first match counts
    flops: float  # dense bf16 FLOP/s with fp32 accumulation, in float16 where there is no bf16
    memory_gib: int  # of the largest one of this name


# NVIDIA's data sheets (half of the FLOP/s "with sparsity"): A100, H100, H200, GH200, HGX B200, L4, L40, L40S, A10, T4, V100;
# for GeForce and RTX A cards the tables of the GA102, Ada and RTX Blackwell architecture white papers.
_GPUS = (
    GPU("B200", 2250e12, 180),
    GPU("GH200", 990e12, 144),
    GPU("H200 NVL", 835e12, 141),
    GPU("H200", 989e12, 141),
    GPU("H100 PCIe", 756e12, 80),
    GPU("H100 NVL", 835e12, 94),
    GPU("H100", 989e12, 80),
    GPU("A100", 312e12, 80),
    GPU("L40S", 362e12, 48),
    GPU("L40", 181e12, 48),
    GPU("L4", 121e12, 24),
    GPU("A10", 125e12, 24),
    GPU("A6000", 154.8e12, 48),
    GPU("5090", 209.5e12, 32),
    GPU("4090", 165.2e12, 24),
    GPU("3090", 71e12, 24),
    GPU("V100 SXM2", 125e12, 32),
    GPU("V100 PCIE", 112e12, 32),
    GPU("T4", 65e12, 16),
)


def peak_flops(device_name: str) -> float | None:
    """Returns the peak of a GPU by its CUDA name; None where unknown, so that no wrong utilisation is shown."""
    found = known_gpu(device_name)
    return None if found is None else found.flops


def known_gpu(device_name: str) -> GPU | None:
    """Returns the GPU of this CUDA name, in any case; None where it is unknown."""
    words = set(device_name.upper().replace("-", " ").split())
    if words & {"LAPTOP", "D", "MIG", "TI"}:
        return None
    return next((gpu for gpu in _GPUS if set(gpu.name.upper().split()) <= words), None)


class BudgetConfig(Config):
    """What plan=true reckons time and cost by."""

    gpu: str | None = None
    """Name of the GPU, such as H100, whose peak is known. null: the one here."""
    mfu: float = Field(0.4, gt=0, le=1)
    """Part of its peak that the model's own arithmetic will take."""
    price: float | None = Field(None, gt=0)
    """What an hour of one GPU costs. null: hours alone are told."""

    @model_validator(mode="after")
    def _peak_is_known(self) -> Self:
        if self.gpu is not None and peak_flops(self.gpu) is None:
            raise ValueError(f"gpu={self.gpu} has no known peak. Choose one of {', '.join(name for name, *_ in _GPUS)}.")
        return self
