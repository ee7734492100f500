------------------------------- MODULE Parts -------------------------------
(***************************************************************************)
(* Payloads that travel in parts while they are packed:                    *)
(* weightsync/engine/parts.py, and the links that take parts in            *)
(* weightsync/transports/pipe/link.py and store/link.py, store/arriving.py.*)
(*                                                                         *)
(* In AckProtocol.tla an update arrives whole.  This module shows why that *)
(* also holds if its payload was sent before it, piece by piece: a part is *)
(* no update, whatever becomes of the packing.  A payload lies in a slot   *)
(* that the worker maps (InSlots), where it hashes what is written while   *)
(* the rest is being packed; or it travels, and is gathered there.         *)
(*                                                                         *)
(* The content of a payload is its number, in each of its two chunks.      *)
(* Versions are numbered as they are sent.  While a payload is packed, a   *)
(* second thread of the trainer may pack another and send it whole, so the *)
(* payload that was begun first may be the later version.                  *)
(*                                                                         *)
(* Abstracted: one sender, one worker; an answer arrives at once; digests  *)
(* tell every content apart; the second thread packs and sends in one      *)
(* step, and only the first sends parts; a chunk that does not count any   *)
(* more may be sent again, which the code never does.                      *)
(***************************************************************************)
EXTENDS Integers, Sequences

CONSTANTS
  MaxPayload,  \* how many payloads are packed
  MaxLinks,    \* how often the worker is linked
  Threads,     \* how many threads of the trainer pack: with 2, a payload may be sent while another is packed
  InSlots,     \* the worker maps the memory that is packed; otherwise payloads travel
  Verified,    \* the worker compares digests
  Careless     \* rules of this module that are removed for the revert tests; {} otherwise

PartRules == {
  "WrittenFirst",    \* a chunk is sent once it is written
  "OtherForgets",    \* a part of another payload drops what has come of the one before
  "FreshId",         \* each payload has an id of its own
  "NewLinkForgets",  \* what was sent over an earlier link does not count
  "WholeForgets",    \* an update without parts: what was sent in parts before it does not count
  "AllParts",        \* an update names parts only if all were sent
  "UpdateDecides",   \* parts alone are not applied
  "NumberedAtSend",  \* a version's number is drawn when it is sent, not when its packing begins
  "OwedFollows"      \* the version that is owed follows the handshake of a new link
}
ASSUME Careless \subseteq PartRules
ASSUME Threads \in 1..2
ASSUME InSlots \in BOOLEAN /\ Verified \in BOOLEAN

VARIABLES
  packed,    \* how many payloads the trainer has begun to pack
  memory,    \* memory[i][c]: the payload whose chunk c is in slot i; 0: none
  filling,   \* what is being packed: its number, slot and id, the chunks written, and those sent; v = 0: nothing
  aborted,   \* the payloads whose packing failed
  newest,    \* the version that was sent last: its number, its payload and slot
  owed,      \* the version that the worker owes an answer for; 0: none
  link,      \* the number of the newest link
  down,      \* the messages on the way to the worker over the newest link, oldest first
  hashed,    \* what the worker has of the newest payload in parts: its id, and the content of each chunk; 0: none
  served,    \* the version served: its number, its payload, slot and content
  refused,   \* the versions whose digest was another
  incomplete \* whether an update named parts that had not come

trainer == <<packed, memory, filling, aborted, newest, owed>>
worker == <<hashed, served, refused, incomplete>>
vars == <<trainer, link, down, worker>>

Chunks == 1..2
Slots == IF InSlots THEN 1..(Threads + 1) ELSE 1..2
Follows(rule) == rule \notin Careless
Empty == [c \in Chunks |-> 0]
Unsent == [version |-> 0, v |-> 0, slot |-> 0]
Nothing == [v |-> 0, slot |-> 0, id |-> 0, written |-> {}, sent |-> {}]
Unread == [id |-> 0, chunks |-> Empty]
Whole(v) == [c \in Chunks |-> v]

Init ==
  /\ packed = 0 /\ memory = [i \in Slots |-> Empty] /\ filling = Nothing /\ aborted = {}
  /\ newest = Unsent /\ owed = 0
  /\ link = 1 /\ down = <<>>
  /\ hashed = Unread /\ served = [version |-> 0, v |-> 0, slot |-> 0, content |-> Empty]
  /\ refused = {} /\ incomplete = FALSE

-----------------------------------------------------------------------------
(* The trainer *)

\* The slot that the worker serves is never packed: Slots.tla.
Free(slot) == slot # served.slot \/ ~InSlots
FreshId(slot) == IF Follows("FreshId") THEN packed + 1 ELSE slot

Acquire(slot) ==
  /\ filling.v = 0 /\ owed = 0 /\ packed < MaxPayload
  /\ Free(slot)
  /\ packed' = packed + 1
  /\ filling' = [Nothing EXCEPT !.v = packed + 1, !.slot = slot, !.id = FreshId(slot)]
  /\ UNCHANGED <<memory, aborted, newest, owed, link, down, worker>>

Write(chunk) ==
  /\ filling.v # 0 /\ chunk \notin filling.written
  /\ memory' = [memory EXCEPT ![filling.slot][chunk] = filling.v]
  /\ filling' = [filling EXCEPT !.written = @ \cup {chunk}]
  /\ UNCHANGED <<packed, aborted, newest, owed, link, down, worker>>

\* What travels stays as it is until it was written to the connection.
SendPart(chunk) ==
  /\ filling.v # 0 /\ chunk \notin filling.sent
  /\ chunk \in filling.written \/ ~Follows("WrittenFirst")
  /\ down' = Append(down, [kind |-> "PART", version |-> 0, v |-> filling.v, id |-> filling.id, slot |-> filling.slot,
                           chunk |-> chunk, content |-> memory[filling.slot]])
  /\ filling' = [filling EXCEPT !.sent = @ \cup {chunk}]
  /\ UNCHANGED <<packed, memory, aborted, newest, owed, link, worker>>

\* A tensor cannot be copied, a value is not finite, the call is interrupted.
Abort ==
  /\ filling.v # 0
  /\ aborted' = aborted \cup {filling.v} /\ filling' = Nothing
  /\ UNCHANGED <<packed, memory, newest, owed, link, down, worker>>

\* The update of a version. Chunk 0: it is no part. Id 0: its payload travels with it.
Update(sent, id) ==
  [kind |-> "UPDATE", version |-> sent.version, v |-> sent.v, id |-> id, slot |-> sent.slot, chunk |-> 0,
   content |-> Whole(sent.v)]

\* Send a payload as the next version. One version is outstanding at a time.
Dispatch(v, slot, id) ==
  /\ owed = 0
  /\ newest' = [version |-> IF Follows("NumberedAtSend") THEN newest.version + 1 ELSE v, v |-> v, slot |-> slot]
  /\ owed' = newest'.version
  /\ down' = Append(down, Update(newest', id))

Send ==
  LET inParts == filling.sent = Chunks \/ (filling.sent # {} /\ ~Follows("AllParts")) IN
  /\ filling.v # 0 /\ filling.written = Chunks
  /\ Dispatch(filling.v, filling.slot, IF InSlots \/ inParts THEN filling.id ELSE 0)
  /\ filling' = Nothing
  /\ UNCHANGED <<packed, memory, aborted, link, worker>>

\* A whole update goes out while another payload is packed. The worker drops what has come of that one.
AfterWhole == IF Follows("WholeForgets") THEN [filling EXCEPT !.sent = {}] ELSE filling

\* A second thread packs another payload and sends it whole.
SendAside(slot) ==
  /\ Threads = 2 /\ filling.v # 0 /\ packed < MaxPayload
  /\ slot # filling.slot /\ Free(slot)
  /\ packed' = packed + 1
  /\ memory' = [memory EXCEPT ![slot] = Whole(packed + 1)]
  /\ Dispatch(packed + 1, slot, IF InSlots THEN FreshId(slot) ELSE 0)
  /\ filling' = AfterWhole
  /\ UNCHANGED <<aborted, link, worker>>

\* A new link to the same worker. The version sent last follows the handshake, whole.
Relink ==
  LET after == IF owed = 0 THEN filling ELSE AfterWhole IN
  /\ link < MaxLinks
  /\ link' = link + 1
  /\ filling' = IF Follows("NewLinkForgets") THEN [after EXCEPT !.sent = {}] ELSE after
  /\ down' = IF owed = 0 \/ ~Follows("OwedFollows") THEN <<>> ELSE <<Update(newest, 0)>>
  /\ hashed' = Unread
  /\ UNCHANGED <<packed, memory, aborted, newest, owed, served, refused, incomplete>>

-----------------------------------------------------------------------------
(* The worker *)

Apply(version, m, content) ==
  /\ served' = [version |-> version, v |-> m.v, slot |-> m.slot, content |-> content]
  /\ owed' = IF owed = version THEN 0 ELSE owed

\* IncomingParts.arrived; of what travels, Arrivals._part.
TakePart(m) ==
  LET known == IF hashed.id = m.id \/ ~Follows("OtherForgets") THEN hashed.chunks ELSE Empty
      chunks == [known EXCEPT ![m.chunk] = IF InSlots THEN memory[m.slot][m.chunk] ELSE m.content[m.chunk]] IN
  /\ hashed' = [id |-> m.id, chunks |-> chunks]
  /\ IF ~Follows("UpdateDecides") /\ chunks = Whole(m.v)
     THEN Apply(served.version, m, chunks)
     ELSE UNCHANGED <<served, owed>>
  /\ UNCHANGED <<refused, incomplete>>

\* Applier.verified: chunks that were hashed are not hashed again.
TakeUpdate(m) ==
  LET came == hashed.id = m.id
      content == IF InSlots THEN memory[m.slot] ELSE IF m.id = 0 THEN m.content ELSE hashed.chunks
      digest == [c \in Chunks |-> IF came /\ hashed.chunks[c] # 0 THEN hashed.chunks[c] ELSE content[c]] IN
  /\ hashed' = Unread
  /\ CASE ~InSlots /\ m.id # 0 /\ (~came \/ \E c \in Chunks : hashed.chunks[c] = 0) ->
            incomplete' = TRUE /\ owed' = 0 /\ UNCHANGED <<served, refused>>
       [] Verified /\ digest # Whole(m.v) ->
            refused' = refused \cup {m.version} /\ owed' = 0 /\ UNCHANGED <<served, incomplete>>
       [] OTHER -> Apply(m.version, m, content) /\ UNCHANGED <<refused, incomplete>>

Receive ==
  /\ down # <<>>
  /\ down' = Tail(down)
  /\ IF Head(down).kind = "PART" THEN TakePart(Head(down)) ELSE TakeUpdate(Head(down))
  /\ UNCHANGED <<packed, memory, filling, aborted, newest, link>>

-----------------------------------------------------------------------------

Next ==
  \/ \E slot \in Slots : Acquire(slot)
  \/ \E chunk \in Chunks : Write(chunk)
  \/ \E chunk \in Chunks : SendPart(chunk)
  \/ Abort
  \/ Send
  \/ \E slot \in Slots : SendAside(slot)
  \/ Relink
  \/ Receive

Fair == WF_vars(Receive)
Spec == Init /\ [][Next]_vars /\ Fair

-----------------------------------------------------------------------------
(* What holds *)

\* A version is served whole, and stays so while the next one is packed.
OnlyTheWholeIsApplied ==
  served.v # 0 => served.content = Whole(served.v) /\ (InSlots => memory[served.slot] = Whole(served.v))

\* What could not be packed is never served.
WhatFailedIsNeverApplied == served.v \notin aborted

\* Parts are invisible to users: no version is refused, and no link fails, because its payload came in parts.
NobodyIsRefused == refused = {}
NoPartIsMissing == ~incomplete

\* G4
ServingIsMonotone == [][served'.version >= served.version]_vars

\* G10: what is owed is answered.
EverySendEnds == owed # 0 ~> owed = 0

-----------------------------------------------------------------------------
(* Canaries *)

\* A version whose payload came in parts, all of them, is applied.
NoneInParts == [][served'.v # served.v => hashed.chunks # Whole(served'.v)]_vars

\* A chunk is read while another payload is being written there.
NoneIsOvertaken == \A c \in Chunks : hashed.chunks[c] \in {0, hashed.id}

\* A version is applied after the parts of one that failed have come.
NoneFails == [][served'.v # served.v => aborted = {}]_vars

\* A version is applied between two parts of a payload that was begun before it, and that is applied later.
Came(v, c) == hashed.id = v /\ hashed.chunks[c] = v
NoneComesBetween == \A v \in 1..MaxPayload, c \in Chunks :
  [](Came(v, c) /\ served.v = 0 => [](Came(v, 3 - c) /\ served.v > v => [](served.v # v)))
=============================================================================
