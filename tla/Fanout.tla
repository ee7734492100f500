------------------------------- MODULE Fanout -------------------------------
(***************************************************************************)
(* Payloads that travel down a tree of workers: each gets them from a      *)
(* parent while that is still receiving, and from the trainer if the       *)
(* parent fails.  weightsync/transports/store/fanout.py and arriving.py.   *)
(*                                                                         *)
(* In AckProtocol.tla an update arrives whole, or not at all.  This module *)
(* shows why that also holds if its payload comes from another worker, and *)
(* why nobody is lost with a parent.  Messages go over each worker's own   *)
(* link, as before.                                                        *)
(*                                                                         *)
(* The trainer keeps the buffer of a version while a worker may still ask  *)
(* for it; then other weights may be written there.  A parent may die,     *)
(* stop, and pass on wrong bytes; a child may take a slow one for silent.  *)
(*                                                                         *)
(* Abstracted: one tree, a chain; a link that is lost is a worker that is  *)
(* dead; every update is applied.                                          *)
(***************************************************************************)
EXTENDS Integers, Sequences

CONSTANTS
  Count,        \* the workers are 1..Count: 1 gets payloads from the trainer, each other one from the one before
  MaxVersion,
  Pieces,       \* of a payload
  MaxFaults,    \* how often a worker dies, or stops
  Features,     \* "wrong": a worker passes on wrong bytes
  Careless      \* rules that are removed for the revert tests; {} otherwise

AllRules == {
  "InOrder",           \* a worker reads the updates of its link in the order in which they were sent
  "WholeFirst",        \* a payload is applied once all of it is there
  "DigestCompared",    \* and only if it is the trainer's, where it came from a parent
  "KeptUntilAnswered", \* the trainer keeps a buffer until each worker has answered, or has been sent it
  "AnswersRelease",    \* an answer releases it
  "DeathsRelease",     \* and so does the end of a link
  "SilenceEnds",       \* a child asks the trainer if its parent sends nothing
  "LaterWait"          \* messages that arrive before the payload that was asked for are read after it
}
ASSUME Careless \subseteq AllRules /\ Features \subseteq {"wrong"}

VARIABLES
  version,  \* the newest version sent
  keeps,    \* keeps[v]: the workers that may still ask for it
  reused,   \* the versions whose buffers hold other weights now
  down,     \* down[w]: what was written to it, oldest first: [kind, v, good]
  up,       \* up[w]: what it has written: [kind, v]
  health,   \* health[w]: "up", "stopped", "dead"
  faults,   \* how often a worker has died or stopped
  doing,    \* doing[w]: what it receives: [v, from, got, good]; v = 0: nothing
  feed,     \* feed[w]: what it passes on: [v, got, good]
  served    \* served[w]: [v, good]

trainer == <<version, keeps, reused>>
links == <<down, up>>
vars == <<trainer, links, health, faults, doing, feed, served>>

Workers == 1..Count
Versions == 1..MaxVersion
Follows(rule) == rule \notin Careless
Idle == [v |-> 0, from |-> "NOBODY", got |-> 0, good |-> TRUE]
Up(w) == health[w] = "up"
Max(a, b) == IF a > b THEN a ELSE b

Init ==
  /\ version = 0 /\ keeps = [v \in Versions |-> {}] /\ reused = {}
  /\ down = [w \in Workers |-> <<>>] /\ up = [w \in Workers |-> <<>>]
  /\ health = [w \in Workers |-> "up"] /\ faults = 0
  /\ doing = [w \in Workers |-> Idle]
  /\ feed = [w \in Workers |-> [v |-> 0, got |-> 0, good |-> TRUE]]
  /\ served = [w \in Workers |-> [v |-> 0, good |-> TRUE]]

-----------------------------------------------------------------------------
(* The trainer *)

Update(w, v) == [kind |-> IF w = 1 THEN "PAYLOAD" ELSE "ROUTED", v |-> v, good |-> TRUE]

\* It may supersede a version that is on its way.
Send ==
  LET v == version + 1
      targets == {w \in Workers : health[w] # "dead"} IN
  /\ version < MaxVersion
  /\ version' = v
  /\ down' = [w \in Workers |-> IF w \in targets THEN Append(down[w], Update(w, v)) ELSE down[w]]
  /\ keeps' = [keeps EXCEPT ![v] = IF Follows("KeptUntilAnswered") THEN targets \ {1} ELSE {}]
  /\ UNCHANGED <<reused, up, health, faults, doing, feed, served>>

\* Nobody can ask for it any more: other weights are written there.
Reuse(v) ==
  /\ v <= version /\ keeps[v] = {} /\ v \notin reused
  /\ reused' = reused \cup {v}
  /\ UNCHANGED <<version, keeps, links, health, faults, doing, feed, served>>

\* A worker asks for a payload: it is sent, and then the buffer is not kept for it.
HearAsk(w) ==
  LET v == Head(up[w]).v IN
  /\ up[w] # <<>> /\ Head(up[w]).kind = "ASK"
  /\ up' = [up EXCEPT ![w] = Tail(@)]
  /\ down' = [down EXCEPT ![w] = Append(@, [kind |-> "SUPPLY", v |-> v, good |-> v \notin reused])]
  /\ keeps' = [keeps EXCEPT ![v] = @ \ {w}]
  /\ UNCHANGED <<version, reused, health, faults, doing, feed, served>>

\* An ack of a version: the worker has the payloads of all up to it.
HearAck(w) ==
  LET v == Head(up[w]).v IN
  /\ up[w] # <<>> /\ Head(up[w]).kind = "ACK"
  /\ up' = [up EXCEPT ![w] = Tail(@)]
  /\ keeps' = IF Follows("AnswersRelease")
              THEN [u \in Versions |-> IF u <= v THEN keeps[u] \ {w} ELSE keeps[u]] ELSE keeps
  /\ UNCHANGED <<version, reused, down, health, faults, doing, feed, served>>

-----------------------------------------------------------------------------
(* A worker *)

\* It reads an update. What it passed on before is not passed on any more.
Readable(w) == IF Follows("InOrder") THEN DOMAIN down[w] \cap {1} ELSE DOMAIN down[w]
Begin(w) ==
  \E i \in Readable(w) :
  LET m == down[w][i]
      from == IF m.kind = "ROUTED" THEN "PARENT" ELSE "LINK" IN
  /\ Up(w) /\ doing[w].v = 0 /\ m.kind # "SUPPLY"
  /\ down' = [down EXCEPT ![w] = SubSeq(@, 1, i - 1) \o SubSeq(@, i + 1, Len(@))]
  /\ doing' = [doing EXCEPT ![w] = [v |-> m.v, from |-> from, got |-> 0, good |-> m.good]]
  /\ feed' = [feed EXCEPT ![w] = [v |-> m.v, got |-> 0, good |-> TRUE]]
  /\ UNCHANGED <<trainer, up, health, faults, served>>

Got(w, good) ==
  LET got == doing[w].got + 1
      sound == doing[w].good /\ good IN
  /\ doing' = [doing EXCEPT ![w].got = got, ![w].good = sound]
  /\ feed' = [feed EXCEPT ![w].got = Max(@, got), ![w].good = @ /\ sound]

\* A piece from the trainer.
Read(w) ==
  /\ Up(w) /\ doing[w].from = "LINK" /\ doing[w].got < Pieces
  /\ Got(w, TRUE)
  /\ UNCHANGED <<trainer, links, health, faults, served>>

\* A piece from the parent, which may be receiving itself. The kernel delivers what a stopped one has written.
Pull(w, good) ==
  /\ Up(w) /\ doing[w].from = "PARENT" /\ doing[w].got < Pieces
  /\ Up(w - 1) /\ feed[w - 1].v = doing[w].v /\ feed[w - 1].got > doing[w].got
  /\ good \/ "wrong" \in Features
  /\ Got(w, good /\ feed[w - 1].good)
  /\ UNCHANGED <<trainer, links, health, faults, served>>

Asked(w) ==
  /\ up' = [up EXCEPT ![w] = Append(@, [kind |-> "ASK", v |-> doing[w].v])]
  /\ doing' = [doing EXCEPT ![w].from = "ASKED"]

\* The parent cannot be reached, has ended, is silent, or passes something else on. It may also be merely slow.
GiveUp(w) ==
  /\ Up(w) /\ doing[w].from = "PARENT" /\ doing[w].got < Pieces
  /\ Follows("SilenceEnds")
  /\ Asked(w)
  /\ UNCHANGED <<trainer, down, health, faults, feed, served>>

\* All pieces have come from the parent, and are not the payload.
Mismatch(w) ==
  /\ Up(w) /\ doing[w].from = "PARENT" /\ doing[w].got = Pieces
  /\ ~doing[w].good /\ Follows("DigestCompared")
  /\ Asked(w)
  /\ UNCHANGED <<trainer, down, health, faults, feed, served>>

\* What it asked for has arrived, perhaps behind later updates: those wait.
TakeSupply(w) ==
  \E i \in DOMAIN down[w] :
    LET m == down[w][i]
        later == SubSeq(down[w], 1, i - 1) IN
    /\ Up(w) /\ doing[w].from = "ASKED" /\ m.kind = "SUPPLY" /\ m.v = doing[w].v
    /\ down' = [down EXCEPT ![w] = (IF Follows("LaterWait") THEN later ELSE <<>>) \o SubSeq(@, i + 1, Len(@))]
    /\ doing' = [doing EXCEPT ![w] = [v |-> m.v, from |-> "LINK", got |-> 0, good |-> m.good]]
    /\ UNCHANGED <<trainer, up, health, faults, feed, served>>

Apply(w) ==
  /\ Up(w) /\ doing[w].from \in {"LINK", "PARENT"}
  /\ doing[w].got = Pieces \/ (~Follows("WholeFirst") /\ doing[w].got > 0)
  /\ doing[w].from = "PARENT" => doing[w].good \/ ~Follows("DigestCompared")
  /\ served' = [served EXCEPT ![w] = [v |-> doing[w].v, good |-> doing[w].good /\ doing[w].got = Pieces]]
  /\ up' = [up EXCEPT ![w] = Append(@, [kind |-> "ACK", v |-> doing[w].v])]
  /\ doing' = [doing EXCEPT ![w] = Idle]
  /\ UNCHANGED <<trainer, down, health, faults, feed>>

-----------------------------------------------------------------------------
(* Faults *)

Die(w) ==
  /\ health[w] # "dead" /\ faults < MaxFaults
  /\ health' = [health EXCEPT ![w] = "dead"] /\ faults' = faults + 1
  /\ down' = [down EXCEPT ![w] = <<>>] /\ up' = [up EXCEPT ![w] = <<>>]
  /\ keeps' = IF Follows("DeathsRelease") THEN [v \in Versions |-> keeps[v] \ {w}] ELSE keeps
  /\ UNCHANGED <<version, reused, doing, feed, served>>

Stop(w) ==
  /\ Up(w) /\ faults < MaxFaults
  /\ health' = [health EXCEPT ![w] = "stopped"] /\ faults' = faults + 1
  /\ UNCHANGED <<trainer, links, doing, feed, served>>

Resume(w) ==
  /\ health[w] = "stopped"
  /\ health' = [health EXCEPT ![w] = "up"]
  /\ UNCHANGED <<trainer, links, faults, doing, feed, served>>

-----------------------------------------------------------------------------

Next ==
  \/ Send
  \/ \E v \in Versions : Reuse(v)
  \/ \E w \in Workers : HearAsk(w)
  \/ \E w \in Workers : HearAck(w)
  \/ \E w \in Workers : Begin(w)
  \/ \E w \in Workers : Read(w)
  \/ \E w \in Workers, good \in BOOLEAN : Pull(w, good)
  \/ \E w \in Workers : GiveUp(w)
  \/ \E w \in Workers : Mismatch(w)
  \/ \E w \in Workers : TakeSupply(w)
  \/ \E w \in Workers : Apply(w)
  \/ \E w \in Workers : Die(w)
  \/ \E w \in Workers : Stop(w)
  \/ \E w \in Workers : Resume(w)

\* Nobody need die, stop, or resume; the trainer need send nothing.
Fair ==
  \A w \in Workers :
    /\ WF_vars(HearAsk(w)) /\ WF_vars(HearAck(w))
    /\ WF_vars(Begin(w)) /\ WF_vars(Read(w)) /\ WF_vars(Apply(w))
    /\ WF_vars(GiveUp(w)) /\ WF_vars(Mismatch(w)) /\ WF_vars(TakeSupply(w))
Spec == Init /\ [][Next]_vars /\ Fair

-----------------------------------------------------------------------------
(* What holds *)

\* Nobody applies a payload that is not whole, or not the trainer's.
OnlyTheWholeIsApplied == \A w \in Workers : served[w].good

\* Versions are applied in order, and none twice.
ServingIsMonotone == [][\A w \in Workers : served'[w] # served[w] => served'[w].v > served[w].v]_vars

\* A buffer is kept for each worker that may still ask for it.
MayAsk(w, v) ==
  \/ \E i \in DOMAIN down[w] : down[w][i].kind = "ROUTED" /\ down[w][i].v = v
  \/ doing[w].v = v /\ doing[w].from = "PARENT"
  \/ \E i \in DOMAIN up[w] : up[w][i].kind = "ASK" /\ up[w][i].v = v
BuffersAreKept == \A w \in Workers, v \in Versions : health[w] # "dead" /\ MayAsk(w, v) => w \in keeps[v] /\ v \notin reused

\* Each worker that works gets the version, or a newer one, whatever its parent does.
EveryWorkerIsServed ==
  [](\A w \in Workers, v \in Versions : version >= v => <>(served[w].v >= v \/ ~Up(w)))

\* A buffer is kept for nobody in the end, but for a worker that does not work.
BuffersAreReleased == [](\A v \in Versions : keeps[v] # {} => <>(\A w \in keeps[v] : health[w] = "stopped"))

-----------------------------------------------------------------------------
(* Canaries *)

\* A worker has a piece that its parent has while that is still receiving.
NobodyPassesOnEarly ==
  \A w \in Workers \ {1} : ~(doing[w].from = "PARENT" /\ doing[w].got > 0 /\ doing[w].v = doing[w - 1].v)

\* A payload that was asked for arrives behind a newer update.
NothingComesLater ==
  \A w \in Workers : ~(doing[w].from = "ASKED" /\ Len(down[w]) > 1 /\ down[w][2].kind = "SUPPLY")

\* A worker that was supplied by the trainer passes the payload on to its own child.
NobodySuppliedPassesOn ==
  \A w \in Workers \ {1} :
    ~(w < Count /\ doing[w].from = "LINK" /\ doing[w + 1].from = "PARENT" /\ doing[w + 1].got > 0 /\ doing[w].v = doing[w + 1].v)
=============================================================================
