"""DeepSpeed's ZeRO-3: the weights too are in slices, and whole only while a module computes with them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.nn.transformer import LM
from lm.storage.checkpoint import ALONE, Piece
from lm.training.strategies.zero import Zero
from lm.training.weights.initial import Fill, materialized


class Zero3(Zero):
    """Every weight is padded to a multiple of the ranks and cut into as many equal slices."""

    meta = True

    def shard(self, model: LM, mesh: Any, fill: Fill) -> None:
        """The engine splits the weights; the head's must be whole while the chunked loss uses it outside of the head's own forward."""
        for part in materialized(model, [*model.units()], self.plugin.root_device, fill):
            mine = set(part.parameters())
            whole = {name: (p, p.detach().flatten().clone()) for name, p in self._kept(model) if p in mine and name not in self._frozen}
            deepspeed.zero.Init(module=part, config_dict_or_path=self.plugin.config)
            for name, (split, flat) in whole.items():
                start, stop = self._range(split)
                self._frozen[name] = flat[start:stop].clone()
        deepspeed.zero.register_external_parameter(model, model.head.weight)

    def ready(self, optimizer: Optimizer) -> None:
        inner = self._engine.optimizer
        for number, flat in enumerate(self._engine.fp32_partitioned_groups_flat):
            group = inner.param_groups[self._engine.sub_group_to_group_id[number]]
            inner.state[flat] = inner.initial_state(group, flat)

    def weights(self, model: nn.Module) -> Iterator[Piece]:
        p: Any  # a parameter with DeepSpeed's notes on it
        for name, p in model.named_parameters():
            if p.requires_grad:
                flat, at = self._place(p)
                yield from self._slice(name, "weight", p, flat.narrow(0, at, p.partition_numel()))
            else:
                yield from self._slice(name, "weight", p, self._frozen.get(name, p.ds_tensor))

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Iterator[Piece]:
        p: Any
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            flat, at = self._place(p)
            for key, tensor in self._engine.optimizer.state[flat].items():
                if tensor.shape == flat.shape:
                    yield from self._slice(name, key, p, tensor.narrow(0, at, p.partition_numel()))
                else:
                    yield Piece.whole(name, key, tensor)

    def _place(self, p: Any) -> tuple[Tensor, int]:
        """The flat float32 tensor that holds this rank's slice of p, and where in it."""
        number, at, _ = self._engine.grad_position[self._engine.get_param_id(p)]
        return self._engine.fp32_partitioned_groups_flat[number], at

    def _slice(self, name: str, kind: str, p: Any, padded: Tensor) -> Iterator[Piece]:
        """Without the padding, of which the last rank's slice may consist."""
        start, stop = self._range(p)
        if start < stop:
            yield Piece(name, kind, tuple(p.ds_shape), (start,), padded.narrow(0, 0, stop - start), share=ALONE)

    def _range(self, p: Any) -> tuple[int, int]:
        """Which elements of the flattened weight this rank keeps."""
        start = min(self.plugin.global_rank * p.partition_numel(), p.ds_numel)
        return start, min(start + p.partition_numel(), p.ds_numel)

    def writing(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
        return found

    def refresh(self, model: nn.Module) -> None:
        engine = self._engine
        engine._partition_all_parameters()
        for number in range(len(engine.fp32_partitioned_groups_flat)):
            engine._reassign_or_swap_out_partitioned_parameters(number)
        p: Any
        for name, p in model.named_parameters():
            if name in self._frozen:
                p.ds_tensor.data.narrow(0, 0, len(self._frozen[name])).copy_(self._frozen[name])
        if engine.persistent_parameters:
            engine.persistent_parameters[0].all_gather(engine.persistent_parameters)

    def whole(self, tensor: Tensor) -> Tensor:
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
