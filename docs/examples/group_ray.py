"""Ray actors act with the policy while the trainer improves it.

python docs/examples/group_ray.py
"""

import ray
import torch
from torch import nn

from weightsync import Worker, WorkerGroup


def act(worker: Worker):  # runs in each actor
    while not worker.stopped:
        worker.put(worker.model(torch.ones(4)).sum().item())


def main(num_workers=2, updates=3):
    policy = nn.Linear(4, 2)
    options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
    with WorkerGroup(act, policy, num_workers, scheme="ray", max_restarts=3, actor_options=options) as group:
        for _, result in zip(range(updates), group.results()):
            print(f"worker {result.worker} acted with version {result.versions[-1]}")
            with torch.no_grad():
                policy.bias.add_(1.0)
            print(group.send())


if __name__ == "__main__":
    ray.init()
    main()
