"""How weights reach Ray actors: the method that is called with them, and its arguments in the object store."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import numpy
import torch

from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, MissingExtraError
from weightsync.keys import SharedKey
from weightsync.options import Option
from weightsync.protocol.messages import Update, WeightsForm
from weightsync.schemes.peers.base import Presenter
from weightsync.transports.base import Link
from weightsync.transports.calls.client import CallClient, CallLink
from weightsync.transports.calls.waiting import AskingClient, NoCallClient
from weightsync.transports.ray.client import TRANSPORT_NAME, ActorCallClient, ActorFunctionCaller, PlainActorCallClient
from weightsync.transports.ray.object_store import ObjectCache, ObjectCaches
from weightsync.transports.ray.session import require_ray
from weightsync.weights.portable_pickle import portable
from weightsync.weights.unpacking import form_taken

#: The method of a `WeightSyncActor` that senders call.
CALL: Final = "_weightsync_call"
#: The method that Ray gives every actor, which runs a function there.
RUN: Final = "__ray_call__"
POLICY_METHOD: Final = "update_policy_weights_"
TENSORDICT_METHOD: Final = "_update_weights_tensordict"
STATE_DICT_METHOD: Final = "_update_weights_state_dict"
#: The methods of plain actors that we call, and the parameter by which each takes the weights.
ARGUMENTS: Final = {POLICY_METHOD: "policy_or_weights", TENSORDICT_METHOD: "params", STATE_DICT_METHOD: "state_dict"}
#: The form of weights that a method takes, if it takes only one.
_FORMS: Final = {TENSORDICT_METHOD: WeightsForm.TENSORDICT, STATE_DICT_METHOD: WeightsForm.FLAT}


#: Why an actor may not have answered yet.
_UNRETURNED: Final = (
    "the call to its actor has not returned: the actor may be starting or restarting (`ray status` shows whether it "
    "waits for resources), busy with an earlier call, waiting for workers of its own, or inside serving()"
)


class TensorTransport(Option):
    """How Ray moves a payload."""

    #: Through Ray's object store: one copy per node, read in place.
    OBJECT_STORE = "object_store"
    #: By NIXL, from memory to memory.
    NIXL = "nixl"


class Backend(Option):
    """TorchRL's name for the process group beside Ray. It is accepted and ignored, since we need none."""

    GLOO = "gloo"
    NCCL = "nccl"


def tensor_transport_of(value: TensorTransport | str) -> TensorTransport:
    """The tensor transport of that name.

    Raises:
        ConfigurationError: there is none.
        MissingExtraError: it needs a package that is not installed.
    """
    chosen = TensorTransport(value)
    if chosen is TensorTransport.NIXL and importlib.util.find_spec("nixl") is None:
        raise MissingExtraError("nixl", 'tensor_transport="nixl"')
    return chosen


class ActorLinks:
    """Creates links to Ray actors; the links of one sender share what it puts into the object store."""

    def __init__(self, transport: TensorTransport, key: SharedKey | None = None) -> None:
        self._key = key
        cache, presenter = ObjectCache(), Presenter()
        if transport is TensorTransport.NIXL:
            self._flat = ObjectCaches(cache, CALL, _as_tensor, _tensor_transport=transport.value)
        else:
            self._flat = ObjectCaches(cache, CALL, _as_array)
        forms = (None, *WeightsForm)
        self._plain = {form: ObjectCaches(cache, f"as {form}", _portable_presenter(presenter, form)) for form in forms}

    def create(self, actor: Any, methods: Sequence[str], model_id: str, peer: str) -> Link:
        """A link that calls the first method that the actor has, unless one of our schemes listens in the actor.

        Raises:
            MissingExtraError: Ray is not installed.
            ConfigurationError: it is not an actor, or not one that a Ray Client can send to.
        """
        require_ray("A link to an actor")
        name, method = method_of(actor, methods, peer)
        handle, key = handle_of(actor), SharedKey.given(self._key)
        actor_id = _id_of(handle)
        worker = (TRANSPORT_NAME, model_id, actor_id) if actor_id else None
        if name == CALL:
            return _make_link(ActorCallClient(method, model_id, peer, self._flat, key, actor_id), peer, worker)
        _refuse_ray_client(handle, peer)
        failing_client = NoCallClient(_no_method_message(actor, methods, peer))
        plain_client = failing_client if name == RUN else self._plain_client(name, method, peer, worker)
        if handle is None:
            return _make_link(plain_client, peer)
        our_client = ActorCallClient(ActorFunctionCaller(handle), model_id, peer, self._flat, key, actor_id)
        asking_client = AskingClient(model_id, lambda: our_client.ask_models(handle), our_client, plain_client)
        return _make_link(asking_client, peer, worker)

    def _plain_client(self, name: str, method: Any, peer: str, worker: Hashable | None) -> PlainActorCallClient:
        form = form_taken(_parameters(method)) if name == POLICY_METHOD else _FORMS.get(name)
        return PlainActorCallClient(_calling(name, method), peer, self._plain[form], worker)


def _make_link(client: CallClient, peer: str, worker: Hashable | None = None) -> Link:
    return CallLink(client, peer, lambda: _UNRETURNED, worker)


def method_of(endpoint: Any, methods: Sequence[str], peer: str) -> tuple[str, Any]:
    """The first of the methods that an actor's handle has: its name, and the method.

    An actor that has none of them may have initialised one of our schemes; it is called with Ray's ``__ray_call__``.

    Raises ConfigurationError: it is not an actor.
    """
    for name in (*methods, RUN):
        for actor in (endpoint, optional(endpoint, "_actor")):
            method = MISSING if actor is MISSING else optional(actor, name)
            if method is not MISSING:
                _require_remote(endpoint, method, peer)
                return name, method
    raise ConfigurationError(
        f"{_wrong_handle_message(endpoint, peer) or _no_method_message(endpoint, methods, peer)} Nothing was sent."
    )


def _wrong_handle_message(endpoint: Any, peer: str) -> str:
    """What to give instead of a name or a call's result; empty if it is neither."""
    if isinstance(endpoint, str):
        return f"{peer} is the str {endpoint!r}, not an actor: give what ray.get_actor({endpoint!r}) returns."
    if isinstance(endpoint, require_ray("A link to an actor").ObjectRef):
        return f"{peer} is an ObjectRef, the result of a call, not an actor: give the actor's handle."
    return ""


def _require_remote(endpoint: Any, method: Any, peer: str) -> None:
    """Refuse a class, or an object of this process: their methods are not calls of an actor."""
    if optional(method, "remote") is not MISSING:
        return
    kind = endpoint if isinstance(endpoint, type) else type(endpoint)
    expression = (
        "its remote(...)" if optional(endpoint, "remote") is not MISSING else f"ray.remote({kind.__name__}).remote(...)"
    )
    raise ConfigurationError(
        f"{peer} is {'the class' if isinstance(endpoint, type) else 'an object of the class'} {kind.__name__}, not a "
        f"running actor: give the handle that {expression} returns. Nothing was sent."
    )


def _no_method_message(endpoint: Any, methods: Sequence[str], peer: str) -> str:
    known = ", ".join(name for name in methods if name != CALL)
    return (
        f"{peer} ({type(endpoint).__name__}) is not an actor with a method that takes weights: derive its class from "
        f"WeightSyncActor, give it {known}, or initialise a RayWeightSyncScheme in it before weights are sent."
    )


def _refuse_ray_client(handle: Any, peer: str) -> None:
    """Refuse a Ray Client's handle: ``ray.put`` never returns in a callback of the client's own, where it would run."""
    if type(handle).__module__.startswith("ray.util.client"):
        raise ConfigurationError(
            f"{peer} is an actor whose class does not derive from WeightSyncActor. A Ray Client (ray://) can send to "
            "no such actor: run the trainer as a process of the cluster, or derive the actor's class. Nothing was sent."
        )


def handle_of(endpoint: Any) -> Any:
    """The actor's handle; None if the endpoint is not one."""
    handles = (each for each in (endpoint, optional(endpoint, "_actor")) if each is not MISSING)
    return next((handle for handle in handles if optional(handle, RUN) is not MISSING), None)


def _id_of(handle: Any) -> str:
    """The actor's id, as `own_actor` gives it in the actor; empty if this is not an actor's handle."""
    known = optional(handle, "_actor_id")
    return "" if known is MISSING else str(known.hex())


def _parameters(method: Any) -> set[str]:
    """The names of a remote method's parameters, if its handle has them."""
    known = optional(method, "_signature")
    return set() if known is MISSING else {parameter.name for parameter in known or ()}


def _calling(name: str, method: Any) -> Callable[[Any], Any]:
    """Call a method with the weights: by the parameter's name, or as the first argument if it has another name."""
    returning_one, argument = returning_once(method), ARGUMENTS[name]
    signature = optional(method, "_signature")
    has_no_signature = signature is MISSING or not signature
    takes_keyword = has_no_signature or any(
        each.name == argument or each.kind is each.VAR_KEYWORD for each in signature
    )
    return (lambda ref: returning_one.remote(**{argument: ref})) if takes_keyword else returning_one.remote


def returning_once(method: Any) -> Any:
    """An actor's method with one result, whatever its ``num_returns``: the result is how we learn of the call's end."""
    options = optional(method, "options")
    return method if options is MISSING else options(num_returns=1)


def _as_array(_: Update, payload: memoryview) -> numpy.ndarray[Any, Any]:
    return numpy.frombuffer(payload, dtype=numpy.uint8)


def _as_tensor(_: Update, payload: memoryview) -> torch.Tensor:
    return torch.frombuffer(payload, dtype=torch.uint8).clone()


def _portable_presenter(presenter: Presenter, form: WeightsForm | None) -> Callable[[Update, memoryview], Any]:
    return lambda update, payload: portable(presenter.present(update, payload, form))
