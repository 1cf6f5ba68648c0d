"""Memory by formula against what is alive where blocks compute some of it again."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm.cost.memory import memory
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.transformer import LM, EncoderDecoderConfig, build_model
from lm.ops.recompute import Recompute
from tests.cost.test_memory import FUSED, SETTING, SMALL, composed


class Alive(TorchDispatchMode):
    """Storages that operations have made and that are still there."""

    def __init__(self, model: LM) -> None:
        super().__init__()
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.again: list[int] = []  # bytes when a block has been computed again
        self._done = False
        for unit in model.units():
            unit.register_forward_hook(self._note, always_call=True)  # it stops as soon as all is there that was not kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if self._done:
            self.again.append(self.bytes())
            self._done = False
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in self._weights:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def _note(self, *_: object) -> None:
        self._done = torch._C._current_graph_task_id() != -1

    def bytes(self) -> int:
        self._made = {key: (ref, n) for key, (ref, n) in self._made.items() if not ref.expired()}
        return sum(n for _, n in self._made.values())


def held(preset: str, how: Recompute, autocast: bool) -> tuple[float, float]:
    """Bytes by formula, and those that are alive when the last block has been computed again."""
    model = build_model(composed(f"model={preset}", FUSED[preset], SMALL).model, seed=0).train()
    model.recomputes(how)
    rows = torch.randint(0, 96, (SETTING.micro_batch, SETTING.seq_len))
    batch = Batch(rows, rows, source_tokens=rows if isinstance(model.cfg, EncoderDecoderConfig) else None)
    assert batch.labels is not None
    with Alive(model) as alive:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            total = model(batch, causal_reader(batch.labels, chunk=SETTING.chunk)).total
        total.backward()
    found = memory(model, replace(SETTING, recompute=how, precision="bf16-mixed" if autocast else "fp32"))
    loss = 4 * sum(p.numel() for p in model.head.parameters()) * (1 + len(model.mtp))  # its gradient, by every loss
    casts = 2 * sum(p.numel() for name, p in model.units()[-1].named_parameters() if p.ndim > 1) if autocast else 0
    gone = (4 + (2 if autocast else 4)) * rows.numel() * model.cfg.d_model  # what the last norm and the head have read
    return found.activations + loss + casts - gone, alive.again[0]


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("preset", [pytest.param(each, marks=[pytest.mark.slow] * (n % 2)) for n, each in enumerate(FUSED)])
def test_memory_by_formula_is_what_is_alive_where_products_are_kept(preset: str, autocast: bool) -> None:
    expected, found = held(preset, Recompute("selective"), autocast)
    assert expected == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2", "palm_8b", "mixtral_8x7b", "phi3_mini", "smollm3_3b", "micro"])
def test_memory_by_formula_is_what_is_alive_where_inputs_of_blocks_are_kept(preset: str, autocast: bool) -> None:
    expected, found = held(preset, Recompute("block"), autocast)
    assert expected == pytest.approx(found, rel=0.1)
