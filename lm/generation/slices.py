"""A frozen model in slices over the ranks, beside a model that is trained so: what it is compared with is no larger than itself.

torch's FSDP2, whatever engine trains; Zhao et al. 2023, arXiv:2304.11277.
"""

from collections.abc import Container

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lm import heap
from lm.nn.materialize import materialized
from lm.nn.transformer import LM
from lm.storage.model_folder import copy_weights, require_same_shapes


@heap.returned()
def sliced(model: LM, weights: dict[str, Tensor], where: str) -> LM:
    """Returns the model in eval mode, with these weights. All ranks must call it, and must call the model equally often.

    A block is whole only while it computes; embedding, last norm and head are so from the first forward on, so that a reader may keep the
    head. Raises CheckpointError where weights do not fit.  model: on the meta device.  weights: emptied, as each rank reads its slices
    of one part after the other.  where: they are from.
    """
    own = dict(model.named_parameters())
    require_same_shapes({n: tuple(p.shape) for n, p in own.items()}, {n: tuple(w.shape) for n, w in weights.items()}, where)

    def fill(model: LM, names: Container[str]) -> None:
        mine = [(name, p) for name, p in model.named_parameters() if name in names]
        copy_weights(mine, {name: weights.pop(name) for name, _ in mine}, where)

    kind = "cuda" if "nccl" in distributed.get_backend() else "cpu"
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    mesh = init_device_mesh(kind, (distributed.get_world_size(),))  # of the group of all ranks that there is, not of a new one
    for part in materialized(model, model.units(), device, fill):
        fully_shard(part, mesh=mesh, ignored_params=set(model.self_updated().values()) & set(part.parameters()))
    for module in model.modules():  # now, since a validation in inference mode may be the first, and no training could write its buffers
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
    return model.eval()
