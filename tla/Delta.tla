------------------------------- MODULE Delta -------------------------------
(***************************************************************************)
(* Deltas: an update that carries only what differs from a base, which its *)
(* worker must hold.  weightsync/engine/delta.py, and what calls it in     *)
(* weightsync/engine/sender_driver.py and receiver_driver.py.              *)
(*                                                                         *)
(* In AckProtocol.tla an update arrives whole.  This module shows why that *)
(* also holds for a delta: a worker that does not hold the base answers    *)
(* NO_BASE, and is sent the whole weights under the same version. Until    *)
(* then the update is in transit for AckProtocol.tla, and its worker owes  *)
(* the answer.                                                             *)
(*                                                                         *)
(* The content of version v is v; a delta that is applied to other content *)
(* than it was made from gives Mix.                                        *)
(*                                                                         *)
(* Abstracted: one sender, one worker; digests tell every content apart.   *)
(***************************************************************************)
EXTENDS Integers, Sequences

CONSTANTS
  MaxVersion,
  MaxLinks,    \* how often the worker is linked
  Duplicates,  \* messages come twice, and overtake each other; otherwise each comes once, in order
  Features,    \* "lose": the worker loses its base; "damage": its base is overwritten; "unfit": it refuses a version;
               \* "abandon": the trainer gives up what is outstanding
  Careless     \* rules that are removed for the revert tests; {} otherwise

AllRules == {
  "BaseNamed",        \* a worker applies a delta to the base that it names, and to no other
  "ResultVerified",   \* the digest is that of the whole result, and compared
  "AckedBase",        \* a delta is sent only to a worker that has acked its base over this link
  "NewLinkForgets",   \* what was acked over an earlier link does not count
  "SnapshotKept",     \* the trainer keeps the bytes of the version that it sent last, until it sends another
  "DecidedFirst",     \* a version that is decided is answered as it was, whether the base is held or not
  "OldIsDropped",     \* a version below the one that is decided or pending is not applied
  "ResentWhole",      \* NO_BASE is followed by the whole weights
  "OnlyTheNewest",    \* unless a newer version was sent since
  "OnceForADelta",    \* and only once for each delta
  "OvertakenIsAnswered", \* a delta without its base is superseded by a newer version, as any update is
  "AcceptedEndsWaiting" \* a version that is accepted no longer waits for its whole weights
}
ASSUME Careless \subseteq AllRules /\ Features \subseteq {"lose", "damage", "unfit", "abandon"}

VARIABLES
  version,   \* the newest version sent
  owed,      \* whether its answer is owed
  outcome,   \* outcome[v]: what the trainer reports
  acked,     \* the version acked last over this link; 0: none
  delta,     \* the version sent last as a delta over this link, and not sent whole since; 0: none
  resent,    \* how often the newest version was sent whole after NO_BASE, over this link
  link,      \* how often the worker was linked
  down, up,  \* messages on their way to the worker, and back, oldest first
  pending,   \* the version that has arrived, and its content; v = 0: none
  served,    \* the version served, and its content
  held,      \* the base, and its content
  decided,   \* the version decided last, and the answer
  \* The newest delta whose base the worker does not hold: it waits for the full weights. 0: no such delta.
  awaiting_full,
  owing,     \* the versions that the worker has taken from this link and not answered
  lost,      \* whether the worker has lost a base
  unfit      \* the versions that the worker refused for other reasons

sender == <<version, owed, outcome, acked, delta, resent>>
worker == <<pending, served, held, decided, awaiting_full, owing, lost, unfit>>
vars == <<sender, link, down, up, worker>>

Versions == 1..MaxVersion
Mix == -1
Nothing == [v |-> 0, content |-> 0]
Undecided == [v |-> 0, kind |-> "NONE", content |-> 0]
Follows(rule) == rule \notin Careless
May(feature) == feature \in Features

Init ==
  /\ version = 0 /\ owed = FALSE /\ outcome = [v \in Versions |-> "NONE"] /\ acked = 0 /\ delta = 0 /\ resent = 0
  /\ link = 1 /\ down = <<>> /\ up = <<>>
  /\ pending = Nothing /\ served = Nothing /\ held = Nothing /\ decided = Undecided
  /\ awaiting_full = 0 /\ owing = {} /\ lost = FALSE /\ unfit = {}

Whole(v) == [v |-> v, base |-> 0, from |-> 0]
Against(v, base) == [v |-> v, base |-> base, from |-> IF Follows("SnapshotKept") THEN base ELSE v]
Answer(v, kind, content) == [v |-> v, kind |-> kind, content |-> content]

\* The versions that these messages answer.
Answered(messages) == {messages[i].v : i \in {j \in DOMAIN messages : messages[j].kind # "NO_BASE"}}

\* What is left once the i-th message was taken.
Without(messages, i) ==
  [n \in 1..(Len(messages) - 1) |-> IF n < i THEN messages[n] ELSE messages[n + 1]]
Taken(messages, i) == {Without(messages, i)} \cup IF Duplicates THEN {messages} ELSE {}
Next1(messages) == IF Duplicates THEN 1..Len(messages) ELSE 1..(IF messages = <<>> THEN 0 ELSE 1)

-----------------------------------------------------------------------------
(* The trainer *)

Send ==
  /\ version < MaxVersion /\ ~owed
  /\ version' = version + 1 /\ owed' = TRUE
  /\ \/ down' = Append(down, Whole(version + 1)) /\ UNCHANGED delta
     \/ /\ version # 0
        /\ acked = version \/ ~Follows("AckedBase")
        /\ down' = Append(down, Against(version + 1, version)) /\ delta' = version + 1
  /\ resent' = 0
  /\ UNCHANGED <<outcome, acked, link, up, worker>>

Abandon ==
  /\ May("abandon") /\ owed
  /\ owed' = FALSE /\ outcome' = [outcome EXCEPT ![version] = "ABANDONED"]
  /\ UNCHANGED <<version, acked, delta, resent, link, down, up, worker>>

\* NO_BASE: it is no answer to the protocol.
HearNoBase(m) ==
  IF delta = m.v \/ ~Follows("OnceForADelta")
  THEN /\ delta' = 0
       /\ IF (m.v = version \/ ~Follows("OnlyTheNewest")) /\ Follows("ResentWhole") /\ resent < 2
          THEN down' = Append(down, Whole(m.v)) /\ resent' = resent + 1
          ELSE UNCHANGED <<down, resent>>
       /\ UNCHANGED <<version, owed, outcome, acked>>
  ELSE UNCHANGED <<sender, down>>

HearAnswer(m) ==
  /\ acked' = IF m.kind = "APPLIED" /\ m.v > acked THEN m.v ELSE acked
  /\ IF owed /\ m.v = version
     THEN owed' = FALSE /\ outcome' = [outcome EXCEPT ![m.v] = m.kind]
     ELSE UNCHANGED <<owed, outcome>>
  /\ UNCHANGED <<version, delta, resent, down>>

Hear(i) ==
  /\ i \in Next1(up)
  /\ up' \in Taken(up, i)
  /\ IF up[i].kind = "NO_BASE" THEN HearNoBase(up[i]) ELSE HearAnswer(up[i])
  /\ UNCHANGED <<link, worker>>

\* A new link: to the same worker, or to a new one. The version sent last follows the handshake.
Relink(restarted) ==
  /\ link < MaxLinks
  /\ link' = link + 1
  /\ owed' = FALSE /\ outcome' = IF owed THEN [outcome EXCEPT ![version] = "LOST"] ELSE outcome
  /\ acked' = IF Follows("NewLinkForgets") THEN 0 ELSE acked
  /\ delta' = 0 /\ resent' = 0
  /\ down' = IF version = 0 THEN <<>> ELSE <<Whole(version)>>
  /\ up' = <<>>
  /\ pending' = Nothing /\ awaiting_full' = 0 /\ owing' = {}
  /\ IF restarted
     THEN served' = Nothing /\ held' = Nothing /\ decided' = Undecided
     ELSE UNCHANGED <<served, held, decided>>
  /\ UNCHANGED <<version, lost, unfit>>

-----------------------------------------------------------------------------
(* The worker *)

Result(m) == IF m.base = 0 THEN m.v ELSE IF held.v # 0 /\ held.content = m.from THEN m.v ELSE Mix

\* The versions that a newer one overtakes: the pending one, and a delta whose base is missing, waiting for the full
\* weights.
Superseded(v) ==
  (IF pending.v = 0 THEN <<>> ELSE <<Answer(pending.v, "SUPERSEDED", 0)>>)
  \o (IF awaiting_full \in 1..(v - 1) /\ Follows("OvertakenIsAnswered")
      THEN <<Answer(awaiting_full, "SUPERSEDED", 0)>>
      ELSE <<>>)

\* ReceiverDriver._take_update. The bytes of a base become those of the result: it is held no more.
Accept(m) ==
  /\ pending' = [v |-> m.v, content |-> Result(m)]
  /\ held' = IF m.base = 0 THEN held ELSE Nothing
  /\ up' = up \o Superseded(m.v)
  /\ owing' = (owing \ Answered(up')) \cup {m.v}
  /\ awaiting_full' = IF Follows("AcceptedEndsWaiting") THEN 0 ELSE awaiting_full
  /\ UNCHANGED <<served, decided, lost, unfit>>

\* ReceiverDriver._waits_for_whole.
NoBase(m) ==
  /\ up' = Append(up, Answer(m.v, "NO_BASE", 0)) /\ awaiting_full' = m.v /\ owing' = owing \cup {m.v}
  /\ UNCHANGED <<pending, served, held, decided, lost, unfit>>

Receive(i) ==
  LET m == down[i]
      old == Follows("OldIsDropped") /\ (m.v <= decided.v \/ m.v <= pending.v)
      missing == m.base # 0 /\ held.v # m.base /\ Follows("BaseNamed") IN
  /\ i \in Next1(down)
  /\ down' \in Taken(down, i)
  /\ CASE missing /\ (~old \/ ~Follows("DecidedFirst")) -> NoBase(m)
       [] old /\ m.v = decided.v -> up' = Append(up, decided) /\ UNCHANGED worker
       [] old /\ m.v # decided.v -> UNCHANGED <<up, worker>>
       [] OTHER -> Accept(m)
  /\ UNCHANGED <<sender, link>>

Decide(kind) ==
  LET answer == Answer(pending.v, kind, pending.content) IN
  /\ decided' = answer
  /\ up' = Append(up, answer)
  /\ pending' = Nothing
  /\ owing' = owing \ Answered(up')

Apply ==
  /\ pending.v # 0
  /\ pending.content = pending.v \/ ~Follows("ResultVerified")
  /\ Decide("APPLIED") /\ served' = pending /\ held' = pending
  /\ UNCHANGED <<sender, link, down, awaiting_full, lost, unfit>>

Refuse ==
  /\ pending.v # 0
  /\ \/ pending.content # pending.v /\ Follows("ResultVerified") /\ UNCHANGED unfit
     \/ May("unfit") /\ unfit' = unfit \cup {pending.v}
  /\ Decide("REFUSED")
  /\ UNCHANGED <<sender, link, down, served, held, awaiting_full, lost>>

Lose ==
  /\ May("lose") /\ held # Nothing
  /\ held' = Nothing /\ lost' = TRUE
  /\ UNCHANGED <<sender, link, down, up, pending, served, decided, awaiting_full, owing, unfit>>

Damage ==
  /\ May("damage") /\ held # Nothing
  /\ held' = [held EXCEPT !.content = Mix] /\ unfit' = Versions
  /\ UNCHANGED <<sender, link, down, up, pending, served, decided, awaiting_full, owing, lost>>

-----------------------------------------------------------------------------

Hears == \E i \in 1..Len(up) : Hear(i)
Receives == \E i \in 1..Len(down) : Receive(i)
Next ==
  \/ Send \/ Abandon \/ (\E restarted \in BOOLEAN : Relink(restarted))
  \/ Hears \/ Receives \/ Apply \/ Refuse \/ Lose \/ Damage

Fair == WF_vars(Hears) /\ WF_vars(Receives) /\ WF_vars(Apply \/ Refuse)
Spec == Init /\ [][Next]_vars /\ Fair

\* A constraint for links that duplicate, on which messages would pile up without end: states with more are checked but
\* not expanded. It cuts behaviours, so no temporal property is checked under it.
Bounded == Len(down) <= 4 /\ Len(up) <= 4

-----------------------------------------------------------------------------
(* What holds *)

\* G2: what is acked was applied, all of it, bit for bit; the ack names what is served and what is held.
AckedMeansServed ==
  /\ served.content = served.v
  /\ \A i \in 1..Len(up) : up[i].kind = "APPLIED" => up[i].content = up[i].v
  /\ \A v \in Versions : outcome[v] = "APPLIED" => v <= served.v \/ link > 1

\* A delta is applied to its base, and to nothing else, unless the base was overwritten; then the digest tells.
OnlyToItsBase == pending.content = pending.v \/ May("damage")

\* Deltas are invisible to users: a worker never refuses a version because it was sent as a delta.
NobodyIsRefusedForADelta == \A v \in Versions : outcome[v] = "REFUSED" => v \in unfit

\* A worker answers NO_BASE only after it has lost a base.
RefusedOnlyIfLost == \A i \in 1..Len(up) : up[i].kind = "NO_BASE" => lost

\* After NO_BASE, a version is sent whole at most once.
ResentOnce == resent <= 1

\* Over a link that keeps the order, no version comes behind a newer one.
InOrder == Duplicates \/ \A i, j \in 1..Len(down) : i < j => down[i].v <= down[j].v

\* G4
ServingIsMonotone == [][served'.v >= served.v \/ link' # link]_vars

\* G6: what is answered SUPERSEDED or REFUSED is not served.
RefusalKeepsServing == \A i \in 1..Len(up) : up[i].kind \in {"SUPERSEDED", "REFUSED"} => up[i].v # served.v

\* G10: what is owed is answered.
EverySendEnds == owed ~> ~owed

\* Over a link that keeps the order, each version that was taken from it is answered, or waits for its whole weights.
EveryUpdateIsAnswered == Duplicates \/ owing \subseteq {awaiting_full, pending.v}

-----------------------------------------------------------------------------
(* Canaries *)

\* A version that was sent whole after NO_BASE is applied.
NoneIsResent == ~(resent = 1 /\ ~owed /\ outcome[version] = "APPLIED" /\ version > 1)

\* A version that was sent as a delta is served.
NoneIsApplied == ~(delta # 0 /\ served.v = delta)

\* NO_BASE comes for a version that a newer one has followed.
NoneIsOvertaken == ~(\E i \in 1..Len(up) : up[i].kind = "NO_BASE" /\ up[i].v < version)
=============================================================================
