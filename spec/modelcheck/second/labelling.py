"""Generates the module and configuration with which TLC prints its graph, with each action's arguments and changes.

The actions' names and arguments are in a variable of their own, which the VIEW leaves out, so they add no states. TLC's
own dump has the names of actions without their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from modelcheck.second.words import Node
from weightsync.errors import ConfigurationError
from weightsync.model.config import Value, constant_lines
from weightsync.model.text import Library

PROTOCOL = "AckProtocol"
MODULE = "SecondGraph"
#: The marks that end the printed lines of a node, and those of a step from it, which has only the changed variables.
FROM, STEP = "FROM", "STEP"

_DISJUNCT = re.compile(r"\\/ \\E (?P<bound>.*?) :\s+(?P<action>\w+)\((?P<args>[^)]*)\)", re.DOTALL)
#: The head of the configuration, with which TLC explores the whole graph and prints it.
_HEAD = "INIT SecondInit\nNEXT SecondNext\nVIEW vars\nACTION_CONSTRAINT SecondStep\nCHECK_DEADLOCK FALSE\n"


def labelling_module(library: Library, root: str, following: str = "Next") -> str:
    """A module that prints every node and every labelled step, generated from `Next` or the definition ``following``.

    Raises:
        ConfigurationError: `Next` is not in the form that is understood, or `vars` has other variables.
    """
    _know_variables(library, root)
    actions = [
        f'  \\/ \\E {" ".join(bound.split())} : {action}({args}) /\\ action\' = <<"{action}", {args}>>'
        for bound, action, args in disjuncts(library, root, following)
    ]
    whole = [_printed(name, name) for name in Node._fields]
    changed = [f"({name}' = {name} \\/ {_printed(name, name + chr(39))})" for name in Node._fields]
    return "\n".join(
        [
            f"---- MODULE {MODULE} ----",
            f"EXTENDS {root}, TLC",
            "VARIABLE action",
            "SecondInit == Init /\\ action = <<>> /\\ TLCSet(1, <<>>)",
            "SecondNext ==",
            *actions,
            "SecondStep ==",
            f"  /\\ TLCGet(1) = vars \\/ ({_all([*whole, _printed(FROM, '<<>>'), 'TLCSet(1, vars)'])})",
            "  /\\ " + _all([*changed, _printed(STEP, "action'")]),
            "====",
            "",
        ]
    )


def _printed(name: str, value: str) -> str:
    """Print one value after its name. TLC keeps every text, so a text must not combine values."""
    return f'PrintT(ToString(<<"{name}", {value}>>))'


def _all(parts: Iterable[str]) -> str:
    return " /\\ ".join(parts)


def disjuncts(library: Library, root: str, following: str = "Next") -> list[tuple[str, str, str]]:
    """The bounds, the name and the arguments of each action of `Next`.

    Raises:
        ConfigurationError: a disjunct is not a named action under one quantifier.
    """
    found = library.resolve(root, following)
    body = found.body if found else ""
    actions = _DISJUNCT.findall(body)
    if not actions or len(actions) != len(re.findall(r"^ *\\/ ", body, re.MULTILINE)):
        raise ConfigurationError(
            f"{following} of {root} cannot be labelled: each disjunct must be a named action under one \\E, "
            "on its own line."
        )
    return actions


def _know_variables(library: Library, root: str) -> None:
    found = library.resolve(root, "vars")
    names = tuple(re.findall(r"\w+", found.body)) if found else ()
    if names != Node._fields:
        raise ConfigurationError(
            f"The variables of {root} are {', '.join(names)}, and {', '.join(Node._fields)} in its second reading: "
            "spec/modelcheck/second/words.py must follow the model."
        )


def labelling_config(constants: Mapping[str, Value]) -> str:
    """The configuration of the generated module: the same constants, and no properties."""
    return _HEAD + "".join(f"{line}\n" for line in constant_lines(constants))
