"""G2 for a model found by its path, with a background reader: a module that replaces it is served from then on."""

from __future__ import annotations

import multiprocessing

import torch
from duo import beside
from fleet import PATIENCE
from torch import nn

from weightsync import MultiProcessWeightSyncScheme


class Actor:
    """A context that can be referenced weakly."""

    def __init__(self) -> None:
        self.policy = nn.Linear(2, 2)


def held(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()}


def test_g2_a_replacement_module_gets_the_next_version_and_the_forward_hooks() -> None:
    ours, theirs = multiprocessing.Pipe()
    source, actor = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, Actor()
    with MultiProcessWeightSyncScheme() as sending, MultiProcessWeightSyncScheme() as receiving:
        sending.init_on_sender(model_id="policy", pipes=[ours])
        receiving.init_on_receiver(model_id="policy", context=actor, pipe=theirs)
        with beside(receiving.connect):
            sending.connect(weights=source)
        first, actor.policy = actor.policy, nn.Linear(2, 2)

        sending.send({name: value * 2 for name, value in source.items()}, timeout=PATIENCE)

        assert held(actor.policy) == {2.0}
        assert held(first) == {1.0}
        assert (len(first._forward_pre_hooks), len(actor.policy._forward_pre_hooks)) == (0, 1)
