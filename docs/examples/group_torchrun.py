"""Rank 0 trains a policy, and the other ranks act with it.

torchrun --standalone --nproc-per-node 3 docs/examples/group_torchrun.py
"""

import torch
import torch.distributed as dist
from torch import nn

from weightsync import Worker, WorkerGroup, run_worker


def act(worker: Worker):  # runs in ranks 1 and above
    while not worker.stopped:
        worker.put(worker.model(torch.ones(4)).sum().item())


def train(policy, updates=3):  # runs in rank 0
    with WorkerGroup(None, policy, scheme="distributed", max_staleness=1) as group:
        for _, result in zip(range(updates), group.results()):
            print(f"worker {result.worker} acted with version {result.versions[-1]}")
            with torch.no_grad():
                policy.bias.add_(1.0)
            print(group.send())


def main():
    dist.init_process_group("gloo")
    policy = nn.Linear(4, 2)
    if dist.get_rank() == 0:
        train(policy)
    else:
        run_worker(act, policy)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
