"""The main job, shown: a policy is trained here while worker processes act with the weights they were sent.

    settings   what to do              policy, environments, training   the learning
    job        the run as a whole      trainer                          start, train, prove
    fleet      the worker processes    rollout, wire                    what they do, and what they say
    grounds    where they are reached  ray_actor, ray_fleet             the same over Ray
    syncing    versions to workers     intake                           experience from them
    board      what there is to show   proof                            what came of it

It uses nothing of weightsync but what any user has.
"""

from weightsync.demo.board import Board, Phase, SyncView, View, WorkerView
from weightsync.demo.fleet import Body
from weightsync.demo.job import run
from weightsync.demo.proof import Fate, Result, Verdict
from weightsync.demo.settings import Casualty, SchemeName, Settings, SyncMode

__all__ = [
    "Board",
    "Body",
    "Casualty",
    "Fate",
    "Phase",
    "Result",
    "SchemeName",
    "Settings",
    "SyncMode",
    "SyncView",
    "Verdict",
    "View",
    "WorkerView",
    "run",
]
