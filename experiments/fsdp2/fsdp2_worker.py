"""PyTorch's side: `fully_shard` on every block and on the root, ZeRO-3."""

import os
from typing import Any

import common


def serve(setup: common.Setup) -> None:
    common.pin(setup.rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{setup.port}",
        rank=setup.rank,
        world_size=1 if setup.alone else common.num_processes,
    )
    torch.distributed.barrier()  # connects the processes
    baseline = common.memory()["now"]
    common.serve(setup.connection, baseline, Trainer(setup.rank, setup.variant, setup.alone))
    torch.distributed.destroy_process_group()


class Trainer:
    def __init__(self, rank: int, variant: str, alone: bool) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model = model = make_model()
        if {"eager": False, "compiled": True}[variant]:
            for block in model.blocks:
                block.compile()
        if not alone:
            mesh = init_device_mesh("cpu", (common.num_processes,))
            for part in [*model.blocks, model]:
                fully_shard(part, mesh=mesh, reshard_after_forward=True)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=common.adamw["learning_rate"],
            betas=(common.adamw["b1"], common.adamw["b2"]),
            eps=common.adamw["eps"],
            weight_decay=common.adamw["weight_decay"],
            fused=True,
        )
        self.batches = [torch.from_numpy(batch).long() for batch in common.local_batches(rank)]

    def step(self, index: int) -> float:
        import torch.distributed as dist

        batch = self.batches[index]
        loss = self.model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def traffic(self) -> dict[str, int]:
        counter = make_counter()
        with counter:
            self.step(0)
        return counter.found

    def bytes_at_rest(self) -> int:
        params = list(self.model.parameters())
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(
            local.numel() * local.element_size()
            for local in (getattr(x, "_local_tensor", x) for x in [*params, *moments])
        )


def make_model() -> Any:
    """The model with the initial weights, whole."""
    import torch
    import torch.nn.functional as F
    from torch import nn

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
            hidden = F.gelu(self.up(self.norm_2(x)), approximate="tanh")
            return x + self.down(hidden)

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

    model = GPT()
    model.load_state_dict(to_torch(common.initial_weights()))
    return model


def to_torch(weights: dict[str, Any]) -> dict[str, Any]:
    """The shared weights under torch's names; `nn.Linear` holds its matrix as [out, in]."""
    import torch

    named = {
        "embed.weight": weights["embed"],
        "positions": weights["positions"],
        "norm.weight": weights["norm"],
    }
    for i, block in enumerate(weights["blocks"]):
        named |= {f"blocks.{i}.{name}.weight": value.T for name, value in block.items()}
    return {name: torch.from_numpy(value.copy()) for name, value in named.items()}


def make_counter() -> Any:
    """Counts collectives as they are dispatched, in the forward and the backward pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = {
        "_allgather_base_": "all-gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "allreduce_": "all-reduce",
    }

    class Counter(TorchDispatchMode):
        found: dict[str, int] = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                op = names[func.overloadpacket.__name__]
                # The whole value: what a gather writes, and what a reduction reads.
                value = args[1] if op == "reduce-scatter" else args[0]
                value = value[0] if op == "all-reduce" else value
                name = f"{op} {str(value.dtype).removeprefix('torch.')}"
                num_bytes = value.numel() * value.element_size()
                self.found = self.found | {name: self.found.get(name, 0) + num_bytes}
            return func(*args, **(kwargs or {}))

    return Counter()
