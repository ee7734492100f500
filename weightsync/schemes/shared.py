"""`SharedMemWeightSyncScheme`: workers map the weights, one copy per host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from weightsync.engine.arguments import require_name
from weightsync.errors import ConfigurationError, LayoutError
from weightsync.options import Verify, WireDtype, switch
from weightsync.schemes.facade_services import torchrl_transport
from weightsync.schemes.pipes import PipeScheme
from weightsync.weights.casting import as_sent
from weightsync.weights.layout import extra_state_name
from weightsync.weights.reading import read_live, read_weights
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.target import Mode, Target


class _DefaultTrue(int):
    """The True of an argument that was not given: the third argument has another meaning in each generation."""

    def __repr__(self) -> str:
        return "True"


_TRUE = _DefaultTrue(True)


class SharedMemWeightSyncScheme(PipeScheme):
    """Over shared memory: the trainer writes a version into a slot once, and every worker on the host maps it.

    A slot is reused only when each worker to which its version was sent has acked a newer one, has refused this one, or
    is known to be dead. So no forward pass sees a mix of versions: a worker changes version only between two forwards,
    in its own `receive()` or in the background. Parameters of a module on the CPU become views of the slot; do not keep
    references to their memory across versions. Buffers, and all destinations that are not modules, are copied out.

    The arguments of both TorchRL generations are accepted. If the first argument is a strategy, they are the second
    generation's and may be positional: ``(strategy, sync, per_worker_weights)``.

    Args:
        policy_weights: maps a model id to a TensorDict or dict, into which each send copies its version. The
            receivers do not read it.
        strategy: "tensordict" (default) or "state_dict", or a `WeightStrategy`.
        auto_register: whether a model that was not registered may be sent.
        sync: whether the scheme's own `send` waits for the answers (default). If not, it returns a report with PENDING
            outcomes, and the next `send`, or `shutdown`, reports the outcomes.
        per_worker_weights: whether ``send({worker_idx: weights})`` may leave workers out; these keep their version.
            Always True for a TorchRL collector with several policy factories. A send that names all workers does not
            need it.
        verify: "auto", "digest" or "layout": see `WeightSyncScheme`.
        wire_dtype: "bfloat16", "float16" or "float32": see `WeightSyncScheme`.
        map_on_device: whether parameters of a module on the trainer's GPU become views of the slot there. If not, they
            are copied out of it. A worker that writes into such parameters writes into those of every worker on that
            GPU. Modules that torch has compiled, or with an RNN, are copied into in any case, and so is every module of
            a worker that captures a CUDA graph: a graph keeps the addresses of its capture.
        delta: refused, since no payload is sent that a delta could make smaller.

    Raises:
        ConfigurationError: an argument has an unknown value or another type, or ``delta=True``.
    """

    apply_mode = Mode.MAP

    def __init__(
        self,
        policy_weights: Mapping[str, Any] | WeightStrategy | str | None = None,
        strategy: WeightStrategy | str | bool = "tensordict",
        auto_register: bool | _DefaultTrue = _TRUE,
        *,
        sync: bool = True,
        per_worker_weights: bool = False,
        verify: Verify | str = Verify.AUTO,
        wire_dtype: torch.dtype | WireDtype | str | None = None,
        map_on_device: bool = False,
        delta: bool = False,
    ) -> None:
        second = isinstance(policy_weights, str | WeightStrategy)
        chosen = policy_weights if isinstance(policy_weights, str | WeightStrategy) else strategy
        if isinstance(chosen, bool):
            raise ConfigurationError(f"strategy is {chosen}: choose 'tensordict' or 'state_dict'.")
        waits = strategy if second and isinstance(strategy, bool) else sync
        super().__init__(chosen, waits, verify=verify, wire_dtype=wire_dtype, delta=delta)
        self.apply_mode = Mode.MAP_ON_DEVICE if switch(map_on_device, "map_on_device") else Mode.MAP
        targets = None if isinstance(policy_weights, str | WeightStrategy) else policy_weights
        self._policy_weights = {} if targets is None else dict(require_targets(targets))
        third = True if isinstance(auto_register, _DefaultTrue) else auto_register
        #: Whether a model that was not registered may be sent.
        self.auto_register = second or switch(third, "auto_register")
        given = third if second and auto_register is not _TRUE else per_worker_weights
        self.per_worker_weights = switch(given, "per_worker_weights")

    @property
    def policy_weights(self) -> dict[str, Any]:
        """The registered copy targets, by model id."""
        return self._policy_weights

    def create_transport(self, pipe_or_context: Any = None, *, pipe: Any = None, **queues: Any) -> Any:
        """TorchRL's transport class over this scheme's registered copy targets.

        Args:
            pipe_or_context: our end of a worker's pipe, or an object whose ``.pipe`` is that; None for no worker.
            pipe: the same, by TorchRL's older name.
            **queues: refused: shared memory uses no queues.

        Raises:
            ConfigurationError: something else was given, or it is not a duplex pipe.
        """
        if queues:
            raise ConfigurationError(f"create_transport() of shared memory takes a pipe, not {', '.join(queues)}.")
        transport = torchrl_transport("SharedMemTransport")(
            self._policy_weights, self.auto_register, strategy=self.strategy
        )
        given = pipe if pipe_or_context is None else pipe_or_context
        if given is not None:
            transport.register_pipe(given)
        return transport

    def register_shared_weights(self, model_id: str, weights: Any) -> None:
        """Register a copy target: a TensorDict or dict that holds the model's newest version after each send.

        Raises:
            ConfigurationError: ``model_id`` is not a model's name, or ``weights`` is of another type.
        """
        require_name(model_id)
        if not isinstance(weights, Mapping | TensorDictBase | torch.nn.Module):
            raise ConfigurationError(
                f"register_shared_weights() was given weights of type {type(weights).__name__}: give a TensorDict or a "
                "dict of tensors, into which each version is copied. Nothing has changed."
            )
        self._policy_weights[model_id] = weights

    def _source(self, weights: Any, model_id: str, context: Any) -> Any:
        """What a send sends. A model that is not registered is refused if ``auto_register`` is off."""
        if not self.auto_register:
            require_registered(model_id, self._policy_weights)
        return super()._source(weights, model_id, context)

    def published(self, model_id: str, weights: Any) -> None:
        """Copy a version, or the part that ``names=`` selects, into the registered copy target, if there is one.

        With ``wire_dtype``, the target has the dtypes of the model, or those that are sent.
        """
        target, selection, wire_dtype = (
            self._policy_weights.get(model_id),
            self._sender_side.selection,
            self._wire_dtype,
        )
        if target is None:
            return
        if wire_dtype is not None:
            weights_read = read_weights(weights) if selection is None else selection.read(weights)
            target_weights = read_live(target) if selection is None else selection.read(target)
            weights = as_sent(weights_read, target_weights, wire_dtype) or weights
        if selection is None:
            self.strategy.apply_weights(target, weights)
        else:  # the rest was not sent, and perhaps cannot be read
            weights_read = selection.read(weights)
            extras = {extra_state_name(module): value for module, value in weights_read.extras().items()}
            Target(target, Mode.COPY, selection.read).apply({**weights_read.tensors, **extras})


_Targets = TypeVar("_Targets", bound=Mapping[str, Any])


def require_targets(policy_weights: _Targets) -> _Targets:
    """Check that ``policy_weights=`` maps models' ids to copy targets.

    Raises:
        ConfigurationError: it is no dict, or holds tensors, and so is the copy target of one model.
    """
    if not isinstance(policy_weights, Mapping):
        what = f"of type {type(policy_weights).__name__}"
    elif tensors := [name for name, weights in policy_weights.items() if isinstance(weights, torch.Tensor)]:
        what = f"a {type(policy_weights).__name__} that holds the tensor {tensors[0]!r}"
    else:
        return policy_weights
    raise ConfigurationError(
        f"policy_weights= is {what}: give a dict that maps a model's id to its copy target, such as "
        "{'policy': weights}."
    )


def require_registered(model_id: str, registered: Mapping[str, Any]) -> None:
    """Refuse a model that is not registered.

    Raises:
        LayoutError: (a KeyError) the model is not registered.
    """
    if model_id not in registered:
        raise LayoutError(
            f"model {model_id!r} is not registered and auto_register is off; registered are {sorted(registered)}. "
            "Nothing was sent: register it first (register_weights() of a transport, register_shared_weights() of a "
            "scheme)."
        )
