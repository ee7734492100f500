"""A scheme over your own transport: sender and receiver in one process, joined by queues."""

from typing import Any

import torch
from queue_transport import Inbox, QueueLink

from weightsync import WeightSyncScheme


class QueueScheme(WeightSyncScheme):
    """An endpoint is two inboxes: ours, and the other end's."""

    def create_link(self, endpoint: tuple[Inbox, Inbox], model_id: str, peer: str) -> QueueLink:
        mine, theirs = endpoint
        return QueueLink(mine, theirs)

    def create_transport(self, pipe_or_context: Any) -> None:
        """No TransportBackend is behind an endpoint: `create_link` makes a link of it."""


def main() -> None:
    one, other = Inbox(), Inbox()
    policy, model = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    scheme = QueueScheme()
    with scheme.create_sender() as sender, scheme.create_receiver() as receiver:
        receiver.register_model(model)
        receiver.register_worker_transport((other, one))
        sender.add_worker(0, (one, other))
        sender.send_async(policy)
        receiver.receive(timeout=1.0)
        report = sender.wait_async()
        print(report[0].kind.name, report[0].evidence.name, torch.equal(model.weight, policy.weight))


if __name__ == "__main__":
    main()
