"""`check_transport`: runs every scenario over an adapter's links."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.options import is_number, items_of, switch
from weightsync.protocol._tables import Delivery
from weightsync.testing.coverage import Coverage
from weightsync.testing.ending_scenarios import ENDING_SCENARIOS
from weightsync.testing.ends import Ends, Factory
from weightsync.testing.graph_scenarios import GRAPH_SCENARIOS
from weightsync.testing.link_scenarios import LINK_SCENARIOS
from weightsync.testing.link_setup import LinkSetup, Scenario
from weightsync.testing.protocol_scenarios import PROTOCOL_SCENARIOS
from weightsync.testing.rules import Broken, Conformance, Nonconforming, Rule, RuleViolation
from weightsync.testing.walks import WALKS
from weightsync.transports.base import require_link

#: The scenarios by name, in the order in which they run.
SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (*LINK_SCENARIOS, *ENDING_SCENARIOS, *PROTOCOL_SCENARIOS, *WALKS, *GRAPH_SCENARIOS)
}
#: Seconds between two checks of a running scenario.
_LOOK_SECONDS = 0.02


def check_transport(
    factory: Factory,
    *,
    unreachable: Mapping[str, str] | None = None,
    patience: float = 10.0,
    only: Collection[str] | None = None,
    stop_at_first: bool = False,
) -> Conformance:
    """Check an adapter against the contract of links and the delivery that its links declare.

    Each scenario has its own connections and its own thread, so that a call that blocks is reported instead of waited
    for.

    Args:
        factory: makes a new connection for the model id that it is called with. See `Ends`.
        unreachable: names of scenarios (see `SCENARIOS`) that the adapter cannot reach, each with the reason. The
            result lists them.
        patience: seconds to wait for an expected event before it counts as missing.
        only: the names of the scenarios to run. None runs all.
        stop_at_first: whether no further scenario is run once one has broken a rule.

    Returns:
        What passed, and what was not reached and why.

    Raises:
        Nonconforming: rules were broken; the error says which, where and how.
        ConfigurationError: an argument is of another type, a scenario is unknown or is declared unreachable without a
            reason, the factory does not return `Ends` of links, or its links declare no `Delivery`.
    """
    if not callable(factory):
        raise ConfigurationError(f"factory= is {factory!r}: give a function of a model id that returns Ends.")
    if not is_number(patience) or not patience > 0:
        raise ConfigurationError(f"patience= is {patience!r}: give seconds, more than 0.")
    switch(stop_at_first, "stop_at_first")
    declared = _parse_unreachable(unreachable)
    chosen = _choose_scenarios(declared, only)
    probe = _require_ends(factory("policy"))
    delivery = probe.sender.delivery
    beside = {each.name: why for each in chosen if each.name not in declared and (why := each.beside(delivery))}
    passed: list[str] = []
    broken: list[Broken] = []
    coverage = Coverage()
    for scenario in chosen:
        if scenario.name in declared or scenario.name in beside:
            continue
        link_setup = LinkSetup(factory, patience, unreachable=declared, coverage=coverage)
        found = _find_undeclared_need(scenario, probe) or _run_scenario(scenario, link_setup)
        broken += [found] if found else []
        passed += [] if found else [scenario.name]
        if found and stop_at_first:
            break
    _dispose(probe)
    conformance = Conformance(
        delivery, tuple(passed), tuple(broken), declared, beside, coverage.by_role(), coverage.unreached()
    )
    if broken:
        raise Nonconforming(conformance)
    return conformance


def _require_ends(made: object) -> Ends:
    if not isinstance(made, Ends):
        raise ConfigurationError(f"the factory made a {type(made).__name__}: it must return Ends(sender, receiver).")
    require_link(made.sender, "the factory's Ends have a sender")
    if not callable(made.receiver):
        require_link(made.receiver, "the factory's Ends have a receiver")
    delivery = made.sender.delivery
    if not isinstance(delivery, Delivery):
        raise ConfigurationError(f"the sender's link declares delivery {delivery!r}: it must be a weightsync.Delivery.")
    return made


def _parse_unreachable(unreachable: Mapping[str, str] | None) -> dict[str, str]:
    """The scenarios that are declared unreachable. Raises ConfigurationError: this is no dict of names to reasons."""
    given = {} if unreachable is None else unreachable
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise ConfigurationError(
            f"unreachable= is {given!r}: give a dict that maps the name of a scenario to the reason, both str."
        )
    return dict(given)


def _choose_scenarios(declared: Mapping[str, str], only: Collection[str] | None) -> list[Scenario]:
    names = list(SCENARIOS) if only is None else items_of(only)
    if names is None or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"only= is {only!r}: give a list of the names of scenarios.")
    unknown = sorted({*declared, *names} - set(SCENARIOS))
    if unknown:
        raise ConfigurationError(f"no such scenarios: {unknown}. There are {sorted(SCENARIOS)}.")
    silent = sorted(name for name, reason in declared.items() if not reason.strip())
    if silent:
        raise ConfigurationError(f"these scenarios are declared unreachable without a reason: {silent}.")
    return [scenario for name, scenario in SCENARIOS.items() if name in names]


def _find_undeclared_need(scenario: Scenario, probe: Ends) -> Broken | None:
    if scenario.needs is None or scenario.needs.of(probe):
        return None
    what = f"it needs {scenario.needs.value}, which is None: give it, or declare the scenario in unreachable="
    return Broken(Rule.DECLARED, scenario.name, (), what)


def _dispose(ends: Ends) -> None:
    ends.sender.close()
    if not callable(ends.receiver):
        ends.receiver.close()
    ends.dispose()


def _run_scenario(scenario: Scenario, link_setup: LinkSetup) -> Broken | None:
    """Run a scenario in a thread. Returns the rule that it broke, or None."""
    raised: list[BaseException] = []
    thread = threading.Thread(
        target=_play_in_thread, args=(scenario, link_setup, raised), name=f"kit: {scenario.name}", daemon=True
    )
    thread.start()
    blocked = _watch_scenario(thread, link_setup)
    unclosed = _tear_down(scenario, link_setup)
    thread.join(link_setup.patience)
    if blocked:
        return Broken(Rule.NEVER_BLOCKS, scenario.name, tuple(link_setup.watch.steps), blocked)
    if not raised:
        return unclosed
    error = link_setup.watch.breach or raised[0]
    if isinstance(error, RuleViolation):
        return Broken(error.rule, scenario.name, tuple(link_setup.watch.steps), error.what)
    if isinstance(error, TransportError | ProtocolError | ConfigurationError):
        what = f"{error!r} was raised where the contract allows no error"
        return Broken(Rule.OWN_ERRORS, scenario.name, tuple(link_setup.watch.steps), what)
    raise error


def _tear_down(scenario: Scenario, link_setup: LinkSetup) -> Broken | None:
    """End the scenario: close every link, even those that are already closed."""
    try:
        link_setup.tear_down()
    except Exception as error:  # noqa: BLE001 - whatever an adapter raises here is reported
        what = f"after the scenario, closing all links raised {error!r}"
        return Broken(Rule.CLOSED, scenario.name, tuple(link_setup.watch.steps), what)
    return None


def _play_in_thread(scenario: Scenario, link_setup: LinkSetup, raised: list[BaseException]) -> None:
    try:
        scenario.play(link_setup)
    except BaseException as error:  # noqa: BLE001 - raised again by the caller
        raised.append(error)


def _watch_scenario(thread: threading.Thread, link_setup: LinkSetup) -> str:
    """Watch the scenario run. Returns the call that blocked, or an empty string."""
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        call = link_setup.watch.call
        if call and link_setup.watch.since.seconds > link_setup.patience:
            return f"{call} has not returned for {link_setup.patience:g} seconds"
    return ""
