"""The bytes of one frame for each kind of message, and each member of each enum on the wire, kept in golden.json.

`python tests/transports/pipe/golden.py` writes golden.json. It refuses if a byte has changed under the protocol version
for which golden.json was written, since peers of that version would misread it: raise `version` in spec/protocol.toml
first. `--unreleased` overrides the refusal, for a version that was raised since the last release and that no released
peer speaks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weightsync.protocol._tables import PROTOCOL_VERSION, RefusalKind
from weightsync.protocol.codec import encode
from weightsync.protocol.messages import (
    Ack,
    BaseRef,
    Bye,
    Ending,
    Hello,
    Message,
    NoBase,
    Part,
    Refusal,
    SlotRef,
    Update,
    WeightsForm,
)
from weightsync.protocol.report import Evidence, Outcome, OutcomeKind, SyncReport

GOLDEN = Path(__file__).with_name("golden.json")
_DIGEST = bytes(range(16))
_DEVICES = bytes(range(32, 64))
_WHO: Any = {"model_id": "policy", "incarnation": 2**100 + 7}


_SLOT = SlotRef(segment=19, seal=bytes(range(16, 32)))
_ON_DEVICE = SlotRef(segment=19, seal=bytes(range(16, 32)), device=bytes(range(32, 48)), nbytes=23)


def messages() -> Iterator[tuple[str, Message]]:
    """The messages with their names in golden.json. No field has its default, so that an omitted field is noticed."""
    laid: Any = {"layout_digest": _DIGEST, "layout": b"layout"}
    yield (
        "Hello",
        Hello(**_WHO, version=3, **laid, host=_DIGEST, pid=11, started=13, fence=2**100, link=17, devices=_DEVICES),
    )
    for form in WeightsForm:
        yield f"Update {form.name}", Update(**_WHO, version=3, **laid, digest=_DIGEST, nbytes=5, extras=b"x", form=form)
    yield "Update in a slot", Update(**_WHO, version=3, **laid, digest=_DIGEST, nbytes=5, slot=_SLOT)
    yield "Update on a device", Update(**_WHO, version=3, **laid, digest=_DIGEST, nbytes=5, slot=_ON_DEVICE)
    traced = f"00-{_DIGEST.hex()}-{_DIGEST[:8].hex()}-01\nvendor=value"
    yield "Update of a traced send", Update(**_WHO, version=3, **laid, digest=_DIGEST, nbytes=5, trace_context=traced)
    yield "Update that is kept", Update(**_WHO, version=3, **laid, digest=_DIGEST, nbytes=5, base=BaseRef())
    base = BaseRef(version=2, digest=_DIGEST)
    yield "Update as a delta", Update(**_WHO, version=3, **laid, digest=_DIGEST, nbytes=5, base=base)
    yield "Update in parts", Update(**_WHO, version=3, **laid, digest=_DIGEST, nbytes=5, payload_id=_DIGEST)
    for evidence in Evidence:
        yield f"Ack {evidence.name}", Ack(**_WHO, version=3, digest=_DIGEST, seconds=0.5, evidence=evidence)
        yield f"Refusal by {evidence.name}", _refusal(RefusalKind.REFUSED, evidence)
    for kind in OutcomeKind:
        yield f"Ack handed on, {kind.name}", Ack(**_WHO, version=3, digest=_DIGEST, nested=_report(kind))
    for refusal in RefusalKind:
        yield f"Refusal {refusal.name}", _refusal(refusal, Evidence.ANSWER)
    yield "NoBase", NoBase(**_WHO, version=3)
    yield "Part", Part(**_WHO, payload_id=_DIGEST, nbytes=7, start=2, end=5, segment=19, hashed=True)
    yield "Part behind its message", Part(**_WHO, payload_id=_DIGEST, nbytes=7, start=2, end=5)
    for ending in Ending:
        yield f"Bye {ending.name}", Bye(**_WHO, reason="it is over", ending=ending)


def _refusal(kind: RefusalKind, evidence: Evidence) -> Refusal:
    return Refusal(
        **_WHO, version=3, kind=kind, reason="it does not fit", remote_traceback="line 1", fence=23, evidence=evidence
    )


def _report(kind: OutcomeKind) -> SyncReport:
    outcome = Outcome(kind=kind, reason="why", remote_traceback="line 1", evidence=Evidence.CALL, fence=29, apply_s=0.5)
    return SyncReport(**_WHO, version=3, outcomes={0: outcome}, superseded={0: (1, 2)}, not_caught_up={1: outcome})


def frames() -> dict[str, str]:
    """The frames that the code encodes now."""
    return {name: encode(message).hex() for name, message in messages()}


def committed() -> tuple[int, Mapping[str, str]]:
    """The protocol version and the frames in golden.json."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return golden["protocol"], golden["frames"]


def changed() -> list[str]:
    """The names of the frames that differ from golden.json."""
    _, before = committed()
    now = frames()
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def main(arguments: list[str]) -> int:
    """Write golden.json. Returns the exit status."""
    if GOLDEN.is_file() and changed() and committed()[0] == PROTOCOL_VERSION and "--unreleased" not in arguments:
        print(
            f"{', '.join(changed())}: not the bytes of protocol {PROTOCOL_VERSION} any more. Its peers would misread "
            "them: raise [protocol] version in spec/protocol.toml, or pass --unreleased if it was raised since the "
            "last release."
        )
        return 1
    GOLDEN.write_text(json.dumps({"protocol": PROTOCOL_VERSION, "frames": frames()}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
