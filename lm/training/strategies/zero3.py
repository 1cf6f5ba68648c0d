"""DeepSpeed's ZeRO-3: the weights too are sliced, and gathered only while a module computes with them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.nn.materialize import Fill, materialized
from lm.nn.mixers.mla import MLA
from lm.nn.transformer import LM
from lm.storage.checkpoint import ALONE, Piece
from lm.training.strategies.zero import Zero


class Zero3(Zero):
    """Every weight is padded to a multiple of the ranks and cut into as many equal slices."""

    meta = True

    def shard(self, model: LM, mesh: Any, fill: Fill) -> None:
        """Lets the engine slice the weights. The head's are registered as the model's too: the chunked loss uses them outside of the head's
        forward, and they stay whole until the model's ends."""
        near = groups._get_zero_param_intra_parallel_group()  # of hpZ, made by Lightning's own Init; another one would make it again
        for part in materialized(model, [*model.units()], self.plugin.root_device, fill):
            mine = set(part.parameters())
            whole = {name: (p, p.detach().flatten().clone()) for name, p in self._kept(model) if p in mine and name not in self._frozen}
            deepspeed.zero.Init(module=part, config_dict_or_path=self.plugin.config, zero_param_parallel_group=near)
            for name, (split, flat) in whole.items():
                start, stop = self._range(split)
                self._frozen[name] = flat[start:stop].clone()
        self._head = model.head
        for p in model.head.parameters():
            deepspeed.zero.register_external_parameter(model, p)
        for attention in (each for each in model.modules() if isinstance(each, MLA)):  # which reads both as matrices where it decodes
            for p in (*attention.k_up.parameters(), *attention.v_up.parameters()):
                deepspeed.zero.register_external_parameter(attention, p)
        model.register_forward_hook(self._gather_before_the_loss)

    def _gather_before_the_loss(self, model: nn.Module, args: Any, output: Any) -> None:
        """Makes the backward begin by gathering the head: the loss hands over its gradients as a whole, and the engine, which gathers
        weights before the backward of the module that they are of, sees none of the head's. What a reader returns is a tensor, or has one
        as `total`."""
        result = output if isinstance(output, Tensor) else getattr(output, "total", None)  # of LossSums
        if result is not None and result.requires_grad:
            result.register_hook(self._gather_head)

    def _gather_head(self, grad: Tensor) -> None:
        p: Any
        for p in self._head.parameters():
            if p.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                p.all_gather()

    def ready(self, optimizer: Optimizer) -> None:
        """Takes the engine's hooks off the head: a loss calls it once a chunk, and ranks, which the engine expects to call all modules in
        one order, have different numbers of labels and so of chunks."""
        engine, inner = self._engine, self._engine.optimizer
        for module in self._head.modules():
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        if engine.persistent_parameters:
            engine.persistent_parameters[0].all_gather(engine.persistent_parameters)
        for number, flat in enumerate(engine.fp32_partitioned_groups_flat):
            with self._fetched(number):
                inner.state[flat] = inner.initial_state(inner.param_groups[engine.sub_group_to_group_id[number]], flat)

    def weights(self, model: nn.Module) -> Iterator[Piece]:
        p: Any  # a parameter with DeepSpeed's notes on it
        for name, p in model.named_parameters():
            if not p.requires_grad:
                yield from self._slice(name, "weight", p, self._frozen.get(name, p.ds_tensor))
        for number, places in enumerate(self._places(model)):
            with self._lent(number) as (flat, _):
                for name, p, at in places:
                    yield from self._slice(name, "weight", p, flat.narrow(0, at, p.partition_numel()))

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Iterator[Piece]:
        for number, places in enumerate(self._places(model)):
            with self._lent(number) as (flat, state):
                for name, p, at in places:
                    for key, tensor in state.items():
                        if tensor.shape == flat.shape:
                            yield from self._slice(name, key, p, tensor.narrow(0, at, p.partition_numel()))
                        else:
                            yield Piece.whole(name, key, tensor)

    def _places(self, model: nn.Module) -> list[list[tuple[str, Any, int]]]:
        """Returns the name of each trained weight, the weight, and where this rank's slice of it begins, by flat float32 tensor."""
        found: list[list[tuple[str, Any, int]]] = [[] for _ in self._engine.fp32_partitioned_groups_flat]
        for name, p in model.named_parameters():
            if p.requires_grad:
                number, at, _ = self._engine.grad_position[self._engine.get_param_id(p)]
                found[number].append((name, p, at))
        return found

    @contextmanager
    def _fetched(self, number: int) -> Iterator[None]:
        """Inside the block a flat tensor and its state are in memory; if they are offloaded to files, they are written back at its end."""
        engine, filed = self._engine, self._engine._swappable_optimizer_subgroup(number)
        if filed:
            engine._optimizer_states_and_gradient_swap_in(number)
        yield
        if filed:
            engine._optimizer_states_and_gradient_swap_out(number)

    @contextmanager
    def _lent(self, number: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields a flat tensor and its state: the live tensors, or, where they are offloaded to files, copies, which are written to the
        files if changed."""
        engine, flat = self._engine, self._engine.fp32_partitioned_groups_flat[number]
        state = engine.optimizer.state[flat]
        if not engine._swappable_optimizer_subgroup(number):
            yield flat, state
            return
        engine._optimizer_states_and_gradient_swap_in(number)
        live = {"": flat.data, **state}
        lent = {key: tensor.detach().clone() for key, tensor in live.items()}
        try:
            yield lent[""], {key: lent[key] for key in state}
        finally:
            if changed := [key for key in live if not torch.equal(live[key], lent[key])]:
                for key in changed:
                    live[key].copy_(lent[key])
                engine._optimizer_states_and_gradient_swap_out(number)
            else:
                engine._release_swap_buffers(number)

    def _slice(self, name: str, kind: str, p: Any, padded: Tensor) -> Iterator[Piece]:
        """Yields this rank's slice of a weight as a piece, without padding; nothing where the slice is all padding."""
        start, stop = self._range(p)
        if start < stop:
            yield Piece(name, kind, tuple(p.ds_shape), (start,), padded.narrow(0, 0, stop - start), share=ALONE)

    def _range(self, p: Any) -> tuple[int, int]:
        """Returns start and stop of this rank's elements in the flattened weight."""
        start = min(self.plugin.global_rank * p.partition_numel(), p.ds_numel)
        return start, min(start + p.partition_numel(), p.ds_numel)

    def writing(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
        return found

    def refresh(self, model: nn.Module) -> None:
        engine = self._engine
        engine._partition_all_parameters()
        for number in range(len(engine.fp32_partitioned_groups_flat)):
            with self._fetched(number):
                engine._reassign_or_swap_out_partitioned_parameters(number)
        p: Any
        for name, p in model.named_parameters():
            if name in self._frozen:
                p.ds_tensor.data.narrow(0, 0, len(self._frozen[name])).copy_(self._frozen[name])
        engine.invalidate_secondary_tensor()
        if engine.persistent_parameters:
            engine.persistent_parameters[0].all_gather(engine.persistent_parameters)

    def whole(self, tensor: Tensor) -> Tensor:
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
