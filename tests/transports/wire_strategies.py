"""Hypothesis strategies for messages."""

from __future__ import annotations

from hypothesis import strategies as st

from weightsync._tables import RefusalKind
from weightsync.messages import Ack, Bye, Hello, Refusal, SlotRef, Update

model_ids = st.text(max_size=20)
wide = st.integers(0, 2**128 - 1)
numbers = st.integers(0, 2**64 - 1)
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
    pid=numbers,
    started=numbers,
    fence=wide,
)
updates = st.builds(
    Update,
    model_id=model_ids,
    incarnation=wide,
    version=numbers,
    layout_digest=blobs,
    layout=blobs,
    digest=digests,
    nbytes=numbers,
    extras=blobs,
    slot=st.none() | st.builds(SlotRef, segment=numbers),
)
acks = st.builds(
    Ack,
    model_id=model_ids,
    incarnation=wide,
    version=numbers,
    digest=digests,
    seconds=st.floats(allow_nan=False),
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
)
byes = st.builds(Bye, model_id=model_ids, incarnation=wide, reason=prose)
messages = st.one_of(hellos, updates, acks, refusals, byes)
