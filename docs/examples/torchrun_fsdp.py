"""Two trainer ranks with FSDP2, and a worker that serves the whole model.

torchrun --standalone --nproc-per-node 2 docs/examples/torchrun_fsdp.py
"""

import multiprocessing

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import weightsync

STEPS = 3


def make_policy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


def act(pipe):
    policy = make_policy()  # plain tensors: nothing is sharded here
    with weightsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_worker("policy", pipe=pipe, model=policy)
        receiver = scheme.get_receiver()
        while receiver.version != STEPS:
            receiver.receive(timeout=60)


def train():
    dist.init_process_group("gloo")
    rank, scheme = dist.get_rank(), weightsync.SharedMemWeightSyncScheme()
    worker = None
    if rank == 0:
        trainer_end, worker_end = multiprocessing.get_context("spawn").Pipe()
        worker = multiprocessing.get_context("spawn").Process(target=act, args=(worker_end,))
        worker.start()
        scheme.init_on_sender("policy", pipes=[trainer_end], processes=[worker])  # no model=: this rank has a part only
        scheme.connect()  # waits until the worker has answered
    dist.barrier()
    policy = fully_shard(make_policy())
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    for _ in range(STEPS):
        policy(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report = weightsync.send_sharded(scheme, policy)  # on every rank
        print(f"rank {rank}: {report}", flush=True)
    if worker is not None:
        worker.join()
    scheme.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
