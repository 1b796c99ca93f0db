"""One update by DeepSpeed's NVMe swappers and CPU-Adam, as its stage 3 calls them for each sub-group."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

# Parameter, two moments and gradient of each of the sub-groups that are in memory: the one that is
# updated, the one that is read and the one that is written.
BUFFERS = {True: 12, False: 4}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user of DeepSpeed can tune; names are those of its configuration.

    Attributes:
      sub_group_size: parameters that are swapped at a time.
      block_size: bytes of one request.
      queue_depth: requests under way at a time, in each thread.
      intra_op_parallelism: threads.
      single_submit: whether requests are submitted one by one.
      overlap_events: whether it waits for requests while it submits others.
    """

    sub_group_size: int = 2**22
    block_size: int = 2**20
    queue_depth: int = 8
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True

    def host_bytes(self, pipelined: bool) -> int:
        """Of all buffers."""
        return 4 * self.sub_group_size * BUFFERS[pipelined]


def start(folder: Path) -> None:
    """DeepSpeed asks for the rank of this process, which is the only one."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    store = f"file://{folder}/rendezvous"
    comm.init_distributed(
        "gloo", init_method=store, rank=0, world_size=1, verbose=False, auto_mpi_discovery=False
    )


class Swapped:
    """Float32 masters and moments in files, gradients and bfloat16 parameters in memory.

    Gradients are float32 where the update reads them, so that nothing is copied or scaled, and none of them
    is on the disk: the engine itself writes those of large sub-groups to files and reads them back.
    """

    def __init__(self, folder: Path, num_params: int, settings: Settings, pipelined: bool):
        folder.mkdir()
        self.folder = folder
        self.size = size = settings.sub_group_size
        assert num_params % size == 0, "sub-groups are alike"
        self.params = torch.zeros(num_params, dtype=torch.bfloat16)
        self.grads = torch.full((num_params,), 2.0**-7)
        self.groups = [torch.empty(0) for _ in range(num_params // size)]
        for i, group in enumerate(self.groups):
            group.ds_id = f"{i}_{i}"
            group.requires_grad = True
        self.optimizer = DeepSpeedCPUAdam(
            [{"params": list(self.groups)}], 1e-3, weight_decay=1e-4, adamw_mode=True
        )
        config = DeepSpeedZeroOffloadOptimizerConfig(
            device="nvme", nvme_path=folder, buffer_count=BUFFERS[pipelined],
            pipeline_read=pipelined, pipeline_write=pipelined,
        )  # fmt: skip
        aio: dict[str, Any] = dataclasses.asdict(settings) | {"use_gds": False}
        del aio["sub_group_size"]
        swapper = PipelinedOptimizerSwapper if pipelined else PartitionedOptimizerSwapper
        self.swapper = swapper(
            config, aio, str(folder), self.optimizer, size, "cpu", torch.float32, None
        )
        self.swapper.initialize_parameters(
            parameters=self.groups, src_tensors=list(torch.zeros(num_params).split(size))
        )

    def step(self) -> None:
        """Sub-group after sub-group; the next one is read, and the one before written, meanwhile."""
        params, grads = (x.split(self.size) for x in (self.params, self.grads))
        for i, group in enumerate(self.groups):
            after = self.groups[i + 1] if i + 1 < len(self.groups) else None
            self.swapper.swap_in_optimizer_state(parameter=group, async_parameter=after)
            group.grad = grads[i]
            self.optimizer.param_groups[0]["params"] = [group]
            self.optimizer.step()
            params[i].copy_(group.data)
            self.swapper.swap_out_optimizer_state(parameter=group, async_swap=after is not None)
