"""Where a scheme finds its arguments: keywords, and the context's attributes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import ref

from tensordict import TensorDictBase
from torch import nn

from weightsync.engine.arguments import require_worker_id
from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, ModelPathError
from weightsync.schemes.relay import has_worker_scheme, is_torchrl_collector
from weightsync.transports.wakeup import AwaitedProcess
from weightsync.weights.extra_state import PerClass
from weightsync.weights.loader import Loader
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.relay import Relay
from weightsync.weights.sharded import is_sharded

#: What ``scheme.model`` was set to is kept under this name, which is no keyword of `init_on_sender`.
SET_MODEL = "scheme.model"


def checked(kwargs: Mapping[str, Any], allowed: Sequence[str], method: str) -> dict[str, Any]:
    """The keywords given, without those that are None.

    Raises ConfigurationError: a keyword that ``method`` does not take.
    """
    unknown = sorted(set(kwargs) - set(allowed))
    if unknown:
        raise ConfigurationError(f"{method}() takes no {', '.join(unknown)}; it takes {', '.join(allowed)}.")
    return {name: value for name, value in kwargs.items() if value is not None}


def given_or_found(keywords: Mapping[str, Any], context: Any, name: str) -> Any:
    """The keyword's value, else the context's attribute of that name; None if there is neither."""
    value = keywords[name] if name in keywords else optional(context, name)
    return None if value is MISSING else value


def processes_of(processes: Any, workers: Collection[int]) -> dict[int, Any]:
    """The workers' processes by worker id, as ``processes=`` gives them.

    Raises ConfigurationError: it is of another type or length, or names unknown workers.
    """
    if processes is None:
        return {}
    if isinstance(processes, Mapping):
        process_of = {require_worker_id(worker, "processes"): process for worker, process in processes.items()}
    elif isinstance(processes, Sequence) and not isinstance(processes, str | bytes) and len(processes) == len(workers):
        process_of = dict(zip(sorted(workers), processes, strict=True))
    else:
        raise ConfigurationError(
            f"processes= is {processes!r}: give the process of each of the {len(workers)} workers, in the order of "
            "their ids, or a mapping of worker ids to processes. Nothing has changed."
        )
    unknown = [worker for worker in process_of if worker not in workers]
    if unknown:
        raise ConfigurationError(f"processes= names workers {unknown}, but there are {sorted(workers)}.")
    for process in process_of.values():
        AwaitedProcess(process)
    return process_of


def model_for_worker(keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
    """What a worker's weights are applied to: a model, or a path on the context.

    A TorchRL collector whose workers make their own policies has no model: it keeps the weights to pass them on.

    Raises ConfigurationError: there is neither a model nor a loader nor a context, or they contradict each other.
    """
    if "loader" in keywords:
        return _loader(keywords)
    loader_only = [f"{name}=" for name in ("name_map", "bucket_bytes") if name in keywords]
    if loader_only:
        raise ConfigurationError(f"{', '.join(loader_only)} can be given with loader= only.")
    if "model" in keywords:
        return model_or_empty(keywords["model"])
    model = _from_get_model(keywords, context, model_id)
    if model is not None and model is not MISSING:
        return model_or_empty(model)
    if context is None:
        raise ConfigurationError(
            "init_on_worker() and init_on_receiver() need model=, loader=, or a context on which model_id is resolved."
        )
    if has_worker_scheme(context, model_id) and _from_path(keywords, context, model_id) is MISSING:
        return Relay()
    return model_id


def _loader(keywords: Mapping[str, Any]) -> Loader:
    if "model" in keywords:
        raise ConfigurationError("model= and loader= were given: a worker takes one of them.")
    if "names" in keywords:
        raise ConfigurationError("names= can be given with model= only: a loader is given all that is sent.")
    return Loader(
        keywords["loader"], **{name: keywords[name] for name in ("name_map", "bucket_bytes") if name in keywords}
    )


def model_or_empty(model: Any) -> Any:
    """What weights are applied to: the model itself, or an empty dict if it has no weights.

    A policy may be any callable: TorchRL's `RandomPolicy` is one without weights.
    """
    return {} if is_weightless(model) else model


def is_weightless(model: Any) -> bool:
    """Whether this is a policy without weights: a callable object that is neither a module nor a class."""
    return is_weightless_kind[ref(type(model))]


@PerClass
def is_weightless_kind(kind: type) -> bool:
    """Whether objects of a type are policies without weights: see `is_weightless`."""
    has_weights = issubclass(kind, nn.Module | TensorDictBase | Mapping | type)
    return not has_weights and issubclass(kind, Callable)  # type: ignore[arg-type]


def registered(
    keywords: Mapping[str, Any], context: Any, model_id: str, unfit: Callable[[Any], bool] | None = None
) -> Any:
    """What a send without weights sends: the first of the sources below that has weights; None: none has."""
    sources = _SOURCES if context is not None else _WITHOUT_CONTEXT
    for source in (_from_set_model, *sources) if SET_MODEL in keywords else sources:
        weights = source(keywords, context, model_id)
        if weights is None or weights is MISSING or (unfit is not None and unfit(weights)):
            continue
        weightless = is_weightless_kind[ref(type(weights))]
        return {} if weightless and weights is not keywords.get("weights") else weights
    return None


def refuse_shards(keywords: Mapping[str, Any]) -> None:
    """Refuse weights that a send without weights could not send, since this rank holds only shards of them.

    Raises ConfigurationError: one of the sources given is sharded over ranks.
    """
    for name in _GIVEN:
        if is_sharded(keywords.get(name)):
            raise ConfigurationError(
                f"{name}= is sharded over ranks (fully_shard(), or DTensors): this rank holds only its shards. Leave "
                f"{name}= out, and call weightsync.send_sharded(scheme, model) on every rank for each version. Nothing "
                "has changed."
            )


def _from_set_model(keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
    return keywords.get(SET_MODEL)


def _from_cached_weights(keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
    if keywords.get("cached_weights") is not None:
        return keywords["cached_weights"]
    get = optional(context, "get_cached_weights")
    return MISSING if get is MISSING else get(model_id)


def _from_get_model(keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
    get_model = optional(context, "get_model")
    if get_model is MISSING:
        return MISSING
    try:
        return get_model(model_id)
    except ValueError:
        if not is_torchrl_collector(context):
            raise
        return MISSING  # a TorchRL collector that has a policy_factory and no policy
    except (AttributeError, LookupError, TypeError) as error:  # raised by a TorchRL collector without that path
        if not is_torchrl_collector(context):
            if not isinstance(error, KeyError):
                raise
            raise ModelPathError(  # a trainer is shown no more than its text
                f"get_model({model_id!r}) of a {type(context).__name__} raised {type(error).__name__}: {error}. Have "
                "it return the model of that name, or give both sides the model_id of a model that it returns.",
                model_id,
            ) from error
        if _from_init_arguments(keywords, context, model_id) is not MISSING:
            return MISSING
        raise ModelPathError(
            f"a {type(context).__name__} has no model {model_id!r} ({error}): a key of weight_sync_schemes= is "
            "'policy', or the path from the collector to another model, such as 'policy.critic'. For a model that only "
            "the workers' collectors have, such as 'env.transform[0]', set scheme.model = ... before.",
            model_id,
        ) from error


def _from_path(keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
    if context is None:
        return MISSING
    try:
        return _resolve_model(context, model_id)
    except ModelPathError:
        return MISSING


def missing_path_reason(context: Any, model_id: str) -> str:
    """Why a context has no model at the path that the model's id is, for messages; empty without a context."""
    try:
        if context is not None:
            _resolve_model(context, model_id)
    except ModelPathError as error:
        return f" {error}"
    return ""


def _from_fallback_policy(keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
    return optional(context, "_fallback_policy") if model_id == "policy" else MISSING


def _from_init_arguments(keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
    for name in _GIVEN:
        if keywords.get(name) is not None:
            return keywords[name]
    return MISSING


_GIVEN = ("cached_weights", "model", "source_model", "weights")
_SOURCES = (_from_cached_weights, _from_get_model, _from_path, _from_fallback_policy, _from_init_arguments)
_WITHOUT_CONTEXT = (_from_init_arguments,)
