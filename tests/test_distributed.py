"""Data-parallel training: each process has graphs of its own, and need not have as many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from graphattn.models import GraphTransformer

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch has no torch.distributed")


def graphs(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    sizes = [(5, 9), (3, 0), (8, 20)][: 3 - rank]  # the second process runs out first
    return [
        (
            torch.randn(nodes, 4, generator=generator),
            torch.randint(nodes, (2, edges), generator=generator),
        )
        for nodes, edges in sizes
    ]


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(GraphTransformer(4, 8, 2, num_layers=2, heads=2, beta=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for x, edge_index in graphs(rank):
            optimizer.zero_grad()
            model(x, edge_index).square().mean().backward()
            optimizer.step()
    torch.save(model.module.state_dict(), f"{folder}/{rank}.pt")
    # The model goes first: a reducer that is the last to let go of the group joins the thread of
    # the group while it holds the GIL, which that thread may be waiting for.
    del model
    dist.destroy_process_group()


def test_c54_two_processes_with_unequal_steps_agree(tmp_path: Path):
    mp.spawn(train, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    torch.manual_seed(0)
    start = GraphTransformer(4, 8, 2, num_layers=2, heads=2, beta=True).state_dict()
    assert any(not torch.equal(first[name], start[name]) for name in start)
    for name in start:
        assert torch.equal(first[name], second[name]), name
