"""Device meshes: the ranks as a grid of several dimensions, each line of which is a process group."""

from collections.abc import Mapping
from datetime import timedelta
from math import prod

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh


def mesh_of(device: str, sizes: Mapping[str, int], timeout_s: int) -> DeviceMesh:
    """Returns a mesh of all ranks with named dimensions; neighbouring ranks lie along the last one. All ranks must call it.

    torch's own init_device_mesh would give the process groups another timeout than launch.timeout_s.
    """
    ranks, mine, groups = torch.arange(prod(sizes.values())).view(*sizes.values()), distributed.get_rank(), []
    for dim, size in enumerate(sizes.values()):
        for line in ranks.movedim(dim, -1).reshape(-1, size).tolist():
            group = distributed.new_group(line, timedelta(seconds=timeout_s))
            if mine in line:
                groups.append(group)
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=tuple(sizes))
