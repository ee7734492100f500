"""Breadth-first search over the model network, and the comparison of its graph with another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache

import receivers
import senders
import xxhash
from machines import RefusedError, forget
from modelcheck.second import Bounds, Graph, Label, Node
from modelcheck.second.words import Entry, Payload, Receiver, Sender
from network import Trainer, Worker, World, link_of, start

from weightsync.protocol.messages import Ack, Refusal
from weightsync.protocol.receiver import Deferred


def search(bounds: Bounds) -> Graph:
    """The graph of all nodes and labelled edges that the shipped halves reach."""
    return explore(bounds)[0]


def explore(bounds: Bounds) -> tuple[Graph, list[World]]:
    """The graph, and the worlds whose projections are its nodes. Several worlds may have the same node."""
    forget()
    _sdata.cache_clear()
    _rdata.cache_clear()
    graph, numbers, labels = Graph(), {}, {}

    def number(world: World) -> int:
        node = projected(world)
        at = numbers.setdefault(node, len(graph.nodes))
        if at == len(graph.nodes):
            graph.nodes.append(node)
        return at

    first = start(bounds)
    known = {first: number(first)}
    todo = deque([first])
    while todo:
        world = todo.popleft()
        for label, after in successors(world):
            if after not in known:
                known[after] = number(after)
                todo.append(after)
            graph.edges[known[world], labels.setdefault(label, len(labels)), known[after]] = None
    graph.labels = list(labels)
    return graph, list(known)


def successors(world: World) -> Iterator[tuple[Label, World]]:
    """Every action that can happen in a world, with its arguments, and the world after it.

    An action that the shipped code refuses does not happen. That a refusal changes nothing is checked by
    test_graph_refusals.py.
    """
    for attempts in (senders.attempts, receivers.attempts):
        for label, attempt in attempts(world):
            try:
                after = attempt()
            except RefusedError:
                continue
            if after is not None:
                yield label, after


# --------------------------------------------------------------------------------------------- projection


def projected(world: World) -> Node:
    """The world as values of the variables of AckProtocol.tla."""
    trainers, workers, ids = world.trainers, world.workers, world.bounds.all_workers
    return Node(
        tuple(t.state.value for t in trainers),
        tuple(map(_sdata, trainers)),
        tuple(t.life for t in trainers),
        tuple(t.blocked for t in trainers),
        tuple(w.state.value for w in workers),
        tuple(_rdata(worker, link_of(world, worker)) for worker in workers),
        world.messages,
        world.answers,
        tuple(tuple((s, w) in world.gone for w in ids) for s in world.bounds.all_senders),
    )


@cache
def _sdata(t: Trainer) -> Sender:
    workers = tuple(_entry(t, w) for w in range(1, len(t.created) + 1))
    return Sender(t.data.incarnation, t.data.version, t.serial, t.data.due_all, workers, t.last)


def _entry(t: Trainer, w: int) -> Entry:
    entry = t.data.workers.get(w)
    if entry is None:
        return Entry(t.created[w - 1], "NONE", 0, 0, 0, 0)
    return Entry(entry.link, entry.link_state.name, entry.served, entry.due, entry.catching, entry.fence)


@cache
def _rdata(worker: Worker, link: tuple[int, int]) -> Receiver:
    data = worker.data

    def payload(key: tuple[int, int] | None, serial: int) -> Payload:
        incarnation, version = key or (0, 0)
        return (incarnation, version, serial)

    answer = _answer(data.answer)
    served = payload(data.served, worker.served_p)
    return Receiver(
        link=link,
        fence=data.fence,
        met=worker.met,
        decided=payload(data.decided, worker.decided_p),
        answer=answer,
        pending=payload(data.pending, worker.pending_p),
        served=served,
        live=(served, served),
    )


def _answer(answer: Ack | Refusal | Deferred | None) -> str:
    if isinstance(answer, Refusal):
        return answer.kind.name
    return {type(None): "NONE", Ack: "ACK", Deferred: "DEFERRED"}[type(answer)]


# --------------------------------------------------------------------------------------------- comparison


def difference(ours: Graph, theirs: Graph) -> str:
    """Describe the first edge that only one of the graphs has; empty: the graphs are equal."""
    places = {node: at for at, node in enumerate(theirs.nodes)}
    common = [places.setdefault(node, len(places)) for node in ours.nodes]
    nodes = list(places)
    one = {(common[before], ours.labels[label], common[after]) for before, label, after in ours.edges}
    two = {(before, theirs.labels[label], after) for before, label, after in theirs.edges}
    for who, more, others in (
        ("the code", one - two, set(range(len(theirs.nodes)))),
        ("the model", two - one, set(common)),
    ):
        extra = [edge for edge in more if edge[0] in others]
        if extra:
            before, label, after = min(extra, key=repr)
            pairs = zip(Node._fields, nodes[before], nodes[after], strict=True)
            changed = [f"  {name}: {old!r} -> {new!r}" for name, old, new in pairs if old != new]
            return "\n".join([f"only {who} has {label}, which changes", *(changed or ["  nothing"])])
    return "" if len(places) == len(theirs.nodes) == len(set(common)) else "they have the same edges, but other nodes"


def digest(graph: Graph) -> dict[str, int | str]:
    """The summary of a graph that is committed: its size, and a digest that depends only on its nodes and edges."""
    texts: dict[object, str] = {}

    def text(value: object) -> str:
        """A text that is equal for equal values: sets have no order, and True is 1."""
        if value not in texts:
            if isinstance(value, frozenset):
                texts[value] = "{" + ",".join(sorted(map(text, value))) + "}"
            elif isinstance(value, tuple):
                texts[value] = "(" + ",".join(map(text, value)) + ")"
            else:
                return str(int(value)) if isinstance(value, int) else repr(value)
        return texts[value]

    names = [xxhash.xxh3_128_hexdigest("".join(map(text, node)).encode()) for node in graph.nodes]
    labels = list(map(text, graph.labels))
    lines = sorted(f"{names[before]} {labels[label]} {names[after]}" for before, label, after in graph.edges)
    found = xxhash.xxh3_128()
    for line in (*sorted(names), *lines):
        found.update(f"{line}\n".encode())
    return {"nodes": len(graph.nodes), "edges": len(graph.edges), "digest": found.hexdigest()}
