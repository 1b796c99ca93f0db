"""PyTorch's side: `fully_shard` on every block and on the root, ZeRO-3."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import common


def connect(setup: common.Setup) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{setup.port}",
        rank=setup.rank,
        world_size=1 if setup.alone else common.num_processes,
    )
    dist.barrier()  # waits for the other process


def norm() -> nn.Module:
    return nn.LayerNorm(common.dim, eps=common.norm_epsilon, bias=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(), norm()
        self.qkv = nn.Linear(common.dim, 3 * common.dim, bias=False)
        self.project = nn.Linear(common.dim, common.dim, bias=False)
        self.up = nn.Linear(common.dim, 4 * common.dim, bias=False)
        self.down = nn.Linear(4 * common.dim, common.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (a.unflatten(-1, (common.num_heads, -1)).transpose(1, 2) for a in qkv)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(common.vocab_size, common.dim)
        self.positions = nn.Parameter(torch.empty(common.context, common.dim))
        self.blocks = nn.ModuleList(Block() for _ in range(common.num_layers))
        self.norm = norm()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def shared_weights() -> dict[str, torch.Tensor]:
    """The shared weights under torch's names; `nn.Linear` holds its matrix as [out, in]."""
    weights = common.initial_weights()
    named = {
        "embed.weight": weights["embed"],
        "positions": weights["positions"],
        "norm.weight": weights["norm"],
    }
    for i, block in enumerate(weights["blocks"]):
        named |= {f"blocks.{i}.{name}.weight": value.T for name, value in block.items()}
    return {name: torch.from_numpy(value.copy()) for name, value in named.items()}


class Trainer:
    def __init__(self, setup: common.Setup) -> None:
        self.model = GPT()
        self.model.load_state_dict(shared_weights())
        if {"eager": False, "compiled": True}[setup.variant]:
            for block in self.model.blocks:
                block.compile()
        if not setup.alone:
            mesh = init_device_mesh("cpu", (common.num_processes,))
            for part in [*self.model.blocks, self.model]:
                fully_shard(part, mesh=mesh, reshard_after_forward=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=common.adamw["learning_rate"],
            betas=(common.adamw["b1"], common.adamw["b2"]),
            eps=common.adamw["eps"],
            weight_decay=common.adamw["weight_decay"],
            fused=True,
        )
        batches = common.local_batches(setup.rank)
        self.batches = [torch.from_numpy(batch).long() for batch in batches]

    def step(self, index: int) -> float:
        batch = self.batches[index]
        loss = self.model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)  # so that both sides know the mean over the whole batch
        return loss.item() / dist.get_world_size()

    def traffic(self) -> dict[str, int]:
        with CountCollectives() as counter:
            self.step(0)
        return dict(counter.found)

    def bytes_at_rest(self) -> int:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *moments]
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in local)


class CountCollectives(TorchDispatchMode):
    """Bytes of the whole value of every collective that runs under it, in both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            op, value = {
                "_allgather_base_": lambda: ("all-gather", args[0]),  # what it writes
                "_reduce_scatter_base_": lambda: ("reduce-scatter", args[1]),  # what it reads
                "allreduce_": lambda: ("all-reduce", args[0][0]),
            }[func.overloadpacket.__name__]()
            self.found[op] += value.numel() * value.element_size()
        return func(*args, **(kwargs or {}))
