"""A program that runs TorchRL's RPC collector with `RPCWeightSyncScheme`, and prints the remote policy's weights."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torchrl.weight_update
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributed import rpc
from torchrl.collectors import Collector
from torchrl.collectors.distributed import RPCCollector
from torchrl.envs.libs.gym import GymEnv

from weightsync import RPCWeightSyncScheme

torchrl.weight_update.WeightSyncScheme.register(RPCWeightSyncScheme)


def make() -> Any:
    return GymEnv("CartPole-v1")


def held(rref: Any) -> list[float]:
    policy = rref.local_value().policy
    return sorted({value for parameter in policy.parameters() for value in parameter.flatten().tolist()})


def main() -> None:
    net = nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1))
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    collector = RPCCollector(
        [make],
        policy,
        collector_class=Collector,
        frames_per_batch=10,
        total_frames=1000,
        sync=True,
        launcher="mp",
        tcp_port=int(sys.argv[1]),
        weight_sync_schemes={"policy": RPCWeightSyncScheme()},
    )
    for version, _batch in zip(range(3), collector, strict=False):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.fill_(float(version))
        collector.update_policy_weights_()
        rref = collector.collector_rrefs[0]
        print(version, rpc.rpc_sync(rref.owner(), held, args=(rref,)), flush=True)
    collector.shutdown()


if __name__ == "__main__":
    main()
