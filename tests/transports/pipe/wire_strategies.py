"""Hypothesis strategies for messages."""

from __future__ import annotations

from hypothesis import strategies as st

from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, BaseRef, Bye, Ending, Hello, NoBase, Part, Refusal, SlotRef, Update
from weightsync.protocol.report import Evidence, Outcome, OutcomeKind, SyncReport

model_ids = st.text(max_size=20)
wide = st.integers(0, 2**128 - 1)
numbers = st.integers(0, 2**64 - 1)
versions = st.integers(1, 2**64 - 1)
sizes = st.integers(0, 2**63 - 1)
digests = st.sampled_from([b"", bytes(range(16))]) | st.binary(min_size=16, max_size=16)
blobs = st.binary(max_size=200)
prose = st.text(max_size=60)

hellos = st.builds(
    Hello,
    model_id=model_ids,
    incarnation=wide,
    version=numbers,
    layout_digest=blobs,
    layout=blobs,
    host=blobs,
    pid=st.integers(0, 2**31 - 1),
    started=numbers,
    fence=wide,
    devices=st.integers(0, 64).flatmap(lambda count: st.binary(min_size=16 * count, max_size=16 * count)),
)
identities = st.binary(min_size=16, max_size=16)
slots = st.builds(SlotRef, segment=numbers, seal=identities) | st.builds(
    SlotRef, segment=numbers, seal=identities, device=identities, nbytes=st.just(2**63 - 1)
)
#: W3C trace contexts, with and without a tracestate.
trace_contexts = st.builds(
    lambda version, trace, span, flags, state: f"{version:02x}-{trace:032x}-{span:016x}-{flags:02x}" + state,
    st.integers(0, 254),
    wide,
    numbers,
    st.integers(0, 255),
    st.just("")
    | st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=64).map("\n{}".format),
)
based_updates = st.builds(
    Update,
    model_id=model_ids,
    incarnation=wide,
    version=st.just(2**64 - 1),
    layout_digest=blobs,
    digest=digests,
    nbytes=sizes,
    trace_context=st.just("") | trace_contexts,
    base=st.just(BaseRef()) | st.builds(BaseRef, version=st.integers(1, 2**64 - 2), digest=identities),
)
updates = st.builds(
    Update,
    model_id=model_ids,
    incarnation=wide,
    version=versions,
    layout_digest=blobs,
    layout=blobs,
    digest=digests,
    nbytes=sizes,
    extras=blobs,
    slot=st.none() | slots,
    trace_context=st.just("") | trace_contexts,
)
payload_ids = identities.filter(any)
updates_in_parts = st.builds(
    Update,
    model_id=model_ids,
    incarnation=wide,
    version=versions,
    layout_digest=blobs,
    digest=digests,
    nbytes=st.integers(1, 2**63 - 1),
    extras=blobs,
    payload_id=payload_ids,
)
parts = st.builds(
    lambda ends, **fields: Part(start=ends[0], end=ends[1], nbytes=ends[2], **fields),
    st.lists(sizes, min_size=3, max_size=3, unique=True).map(sorted),
    model_id=model_ids,
    incarnation=wide,
    payload_id=payload_ids,
    segment=numbers,
    hashed=st.booleans(),
)
outcomes = st.builds(
    Outcome,
    kind=st.sampled_from(OutcomeKind),
    reason=prose,
    remote_traceback=prose,
    evidence=st.sampled_from(Evidence),
    fence=wide,
    apply_s=st.floats(0, 1e9),
)
reports = st.builds(
    SyncReport,
    model_id=model_ids,
    version=st.none() | numbers,
    incarnation=wide,
    outcomes=st.dictionaries(st.integers(0, 9), outcomes, max_size=3),
    nbytes=numbers,
    payload_nbytes=st.dictionaries(st.integers(0, 9), numbers, max_size=2),
    superseded=st.dictionaries(st.integers(0, 9), st.lists(numbers, max_size=2).map(tuple), max_size=2),
    not_caught_up=st.dictionaries(st.integers(0, 9), outcomes, max_size=1),
)
acks = st.builds(
    Ack,
    model_id=model_ids,
    incarnation=wide,
    version=versions,
    digest=digests,
    seconds=st.floats(0, allow_nan=False, allow_infinity=False),
    evidence=st.sampled_from(Evidence),
    nested=st.none() | reports,
)
refusals = st.builds(
    Refusal,
    model_id=model_ids,
    incarnation=wide,
    version=numbers,
    kind=st.sampled_from(RefusalKind),
    reason=prose,
    remote_traceback=prose,
    fence=wide,
    evidence=st.sampled_from(Evidence),
)
byes = st.builds(Bye, model_id=model_ids, incarnation=wide, reason=prose, ending=st.sampled_from(Ending))
no_bases = st.builds(NoBase, model_id=model_ids, incarnation=wide, version=versions)
messages = st.one_of(hellos, updates, based_updates, updates_in_parts, acks, refusals, byes, no_bases, parts)
