------------------------------- MODULE Group -------------------------------
(***************************************************************************)
(* A worker group: the bound on staleness, the results and their channel,  *)
(* and restarts.  weightsync/group.                                        *)
(*                                                                         *)
(* The trainer dispatches a version, announces it to each worker, and      *)
(* waits for the answers, or takes results meanwhile.  A version that      *)
(* finds Unanswered older ones on the link of a worker waits in the        *)
(* trainer until it reads an answer (Backlog.tla): then the newest leaves. *)
(* A worker passes a gate, takes a step with the version that it serves,   *)
(* and now and then puts a result, for which there must be room in its     *)
(* channel.  A thread of the worker receives meanwhile.                    *)
(*                                                                         *)
(* Workers learn of a version one by one, as over their channels. Shared   *)
(* memory is the case where all workers learn of a version at the same     *)
(* time.                                                                   *)
(*                                                                         *)
(* Abstracted: one send at a time, to all workers, and the newest          *)
(* supersedes; an update is applied or lost with its worker, as            *)
(* AckProtocol.tla has it.                                                 *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, Sequences

CONSTANTS
  Workers,
  MaxVersion,
  Limit,        \* max_staleness
  Capacity,     \* results of a worker that may be on their way
  MaxRestarts,
  Unanswered,   \* versions on their way to a worker, and not answered
  Careless      \* rules that are removed for the revert tests; {} otherwise

AllRules == {
  "GateAtStep",           \* the worker compares what it serves with what is announced, before each step
  "AnnounceDispatched",   \* only what was dispatched is announced
  "DriveInResults",       \* the trainer reads answers also while it takes results
  "AnswersAdmit",         \* an answer lets the version that waits in the trainer leave
  "AnswersNameTheirs",    \* an answer counts only for the version that it names
  "ReceiveInBackground",  \* a worker that waits for room in its channel receives all the same
  "FreshFirst",           \* the function of a worker begins once it serves a version
  "NameWhatActs",         \* a result names the version that is served once the step has begun, not at the gate
  "RoomIsOfThisLife"      \* a result of a former life that is taken makes no room in the new channel
}
ASSUME Careless \subseteq AllRules

VARIABLES
  version,    \* the newest version dispatched
  announced,  \* announced[w]: the newest version that the worker has heard of
  owed,       \* workers that have not answered it
  awaits,     \* whether the trainer waits for them, and takes no results
  sent,       \* sent[w]: the versions that were sent to the worker, and not answered as far as the trainer has read
  waits,      \* workers for which the newest version waits in the trainer
  updates,       \* <<w, v>>: updates on their way
  acks,       \* <<w, v>>
  pc,         \* pc[w]: where the worker is
  served,     \* served[w]: 0: none
  floor,      \* floor[w]: the oldest version that the step under way may have
  made,       \* made[w]: the versions that the next result will name
  truth,      \* truth[w]: those that it was made with
  room,       \* room[w]: how many results it may put
  life,       \* life[w]: how often it was restarted
  results     \* results[w]: not taken yet, oldest first: [life, named]

backlog == <<sent, waits>>
trainer == <<version, announced, owed, awaits, backlog>>
worker == <<pc, served, floor, made, truth>>
vars == <<trainer, updates, acks, worker, room, life, results>>

Versions == 1..MaxVersion
Follows(rule) == rule \notin Careless
Alive == {w \in Workers : pc[w] # "dead"}

Init ==
  /\ version = 0 /\ announced = [w \in Workers |-> 0] /\ owed = {} /\ awaits = FALSE
  /\ sent = [w \in Workers |-> {}] /\ waits = {} /\ updates = {} /\ acks = {}
  /\ pc = [w \in Workers |-> "starting"] /\ served = [w \in Workers |-> 0] /\ floor = [w \in Workers |-> 0]
  /\ made = [w \in Workers |-> {}] /\ truth = [w \in Workers |-> {}]
  /\ room = [w \in Workers |-> Capacity] /\ life = [w \in Workers |-> 0] /\ results = [w \in Workers |-> <<>>]

-----------------------------------------------------------------------------
(* The trainer *)

\* It waits for the answers (send), or goes on (send_async). The version supersedes one that waits.
Send(await) ==
  LET full == {w \in Alive : Cardinality(sent[w]) >= Unanswered} IN
  /\ version < MaxVersion /\ ~awaits
  /\ version' = version + 1
  /\ updates' = updates \cup {<<w, version + 1>> : w \in Alive \ full}
  /\ sent' = [w \in Workers |-> IF w \in Alive \ full THEN sent[w] \cup {version + 1} ELSE sent[w]]
  /\ waits' = full
  /\ owed' = Alive
  /\ awaits' = (await /\ Alive # {})
  /\ UNCHANGED <<announced, acks, worker, room, life, results>>

Announce(w) ==
  /\ announced[w] < (IF Follows("AnnounceDispatched") THEN version ELSE MaxVersion)
  /\ announced' = [announced EXCEPT ![w] = @ + 1]
  /\ UNCHANGED <<version, owed, awaits, backlog, updates, acks, worker, room, life, results>>

\* An answer counts for all versions sent before. What waits leaves.
Hear(w, v) ==
  LET left == {u \in sent[w] : u > v}
      leaves == {u \in {version} : w \in waits /\ Cardinality(left) < Unanswered /\ Follows("AnswersAdmit")} IN
  /\ <<w, v>> \in acks
  /\ awaits \/ Follows("DriveInResults")
  /\ acks' = acks \ {<<w, v>>}
  /\ sent' = [sent EXCEPT ![w] = left \cup leaves]
  /\ waits' = IF leaves = {} THEN waits ELSE waits \ {w}
  /\ updates' = updates \cup {<<w, u>> : u \in leaves}
  /\ owed' = IF v = version \/ ~Follows("AnswersNameTheirs") THEN owed \ {w} ELSE owed
  /\ awaits' = (awaits /\ owed' # {})
  /\ UNCHANGED <<version, announced, worker, room, life, results>>

Take(w) ==
  /\ ~awaits /\ results[w] # <<>>
  /\ results' = [results EXCEPT ![w] = Tail(@)]
  /\ room' = IF Head(results[w]).life = life[w] \/ ~Follows("RoomIsOfThisLife") THEN [room EXCEPT ![w] = @ + 1] ELSE room
  /\ UNCHANGED <<trainer, updates, acks, worker, life>>

\* It is owed nothing more. What it has put can still be taken.
Die(w) ==
  /\ w \in Alive /\ life[w] < MaxRestarts
  /\ pc' = [pc EXCEPT ![w] = "dead"] /\ served' = [served EXCEPT ![w] = 0]
  /\ made' = [made EXCEPT ![w] = {}] /\ truth' = [truth EXCEPT ![w] = {}]
  /\ updates' = {m \in updates : m[1] # w} /\ acks' = {m \in acks : m[1] # w}
  /\ owed' = owed \ {w} /\ awaits' = (awaits /\ owed' # {})
  /\ sent' = [sent EXCEPT ![w] = {}] /\ waits' = waits \ {w}
  /\ UNCHANGED <<version, announced, floor, room, life, results>>

\* It joins, has heard of nothing yet, and the newest version is sent to it.
Restart(w) ==
  /\ pc[w] = "dead"
  /\ pc' = [pc EXCEPT ![w] = "starting"]
  /\ life' = [life EXCEPT ![w] = @ + 1] /\ room' = [room EXCEPT ![w] = Capacity]
  /\ updates' = updates \cup {<<w, v>> : v \in {version} \ {0}}
  /\ sent' = [sent EXCEPT ![w] = {version} \ {0}]
  /\ announced' = [announced EXCEPT ![w] = 0]
  /\ UNCHANGED <<version, owed, awaits, waits, acks, served, floor, made, truth, results>>

-----------------------------------------------------------------------------
(* A worker *)

\* Between two steps, or as one begins. What it overtakes is not applied any more.
Receive(w, v) ==
  /\ <<w, v>> \in updates
  /\ pc[w] \in (IF Follows("ReceiveInBackground") THEN {"starting", "between", "begun", "putting"} ELSE {"starting", "between"})
  /\ updates' = {m \in updates : m[1] # w \/ m[2] > v}
  /\ served' = [served EXCEPT ![w] = v]
  /\ acks' = acks \cup {<<w, v>>}
  /\ UNCHANGED <<trainer, pc, floor, made, truth, room, life, results>>

Begin(w) ==
  /\ pc[w] = "starting"
  /\ served[w] # 0 \/ ~Follows("FreshFirst")
  /\ pc' = [pc EXCEPT ![w] = "between"]
  /\ UNCHANGED <<trainer, updates, acks, served, floor, made, truth, room, life, results>>

Gate(w) ==
  /\ pc[w] = "between"
  /\ announced[w] - served[w] <= Limit \/ ~Follows("GateAtStep")
  /\ pc' = [pc EXCEPT ![w] = "begun"]
  /\ floor' = [floor EXCEPT ![w] = announced[w] - Limit]
  /\ made' = IF Follows("NameWhatActs") THEN made ELSE [made EXCEPT ![w] = @ \cup {served[w]}]
  /\ UNCHANGED <<trainer, updates, acks, served, truth, room, life, results>>

Act(w) ==
  /\ pc[w] = "begun"
  /\ pc' = [pc EXCEPT ![w] = "stepping"]
  /\ truth' = [truth EXCEPT ![w] = @ \cup {served[w]}]
  /\ made' = IF Follows("NameWhatActs") THEN [made EXCEPT ![w] = @ \cup {served[w]}] ELSE made
  /\ UNCHANGED <<trainer, updates, acks, served, floor, room, life, results>>

EndStep(w, next) ==
  /\ pc[w] = "stepping"
  /\ pc' = [pc EXCEPT ![w] = next]
  /\ UNCHANGED <<trainer, updates, acks, served, floor, made, truth, room, life, results>>

Put(w) ==
  /\ pc[w] = "putting" /\ room[w] > 0
  /\ pc' = [pc EXCEPT ![w] = "between"]
  /\ room' = [room EXCEPT ![w] = @ - 1]
  /\ results' = [results EXCEPT ![w] = Append(@, [life |-> life[w], named |-> made[w] = truth[w]])]
  /\ made' = [made EXCEPT ![w] = {}] /\ truth' = [truth EXCEPT ![w] = {}]
  /\ UNCHANGED <<trainer, updates, acks, served, floor, life>>

-----------------------------------------------------------------------------

Next ==
  \/ \E await \in BOOLEAN : Send(await)
  \/ \E w \in Workers : Announce(w)
  \/ \E w \in Workers, v \in Versions : Hear(w, v)
  \/ \E w \in Workers : Take(w)
  \/ \E w \in Workers : Die(w)
  \/ \E w \in Workers : Restart(w)
  \/ \E w \in Workers, v \in Versions : Receive(w, v)
  \/ \E w \in Workers : Begin(w)
  \/ \E w \in Workers : Gate(w)
  \/ \E w \in Workers : Act(w)
  \/ \E w \in Workers, next \in {"between", "putting"} : EndStep(w, next)
  \/ \E w \in Workers : Put(w)

\* Each dispatched version is announced and answered, and workers make progress. The trainer need not send, nor take
\* results.
Progress ==
  \A w \in Workers :
    /\ WF_vars(Announce(w)) /\ WF_vars(\E v \in Versions : Hear(w, v))
    /\ WF_vars(Restart(w)) /\ WF_vars(Begin(w)) /\ WF_vars(Gate(w)) /\ WF_vars(Act(w))
    /\ WF_vars(\E next \in {"between", "putting"} : EndStep(w, next)) /\ WF_vars(Put(w))

\* A version goes live between two steps, however many there are. This is assumed: in the code, forwards give way to a
\* swap that waits (engine/serving_lock.py).
Spec == Init /\ [][Next]_vars /\ Progress /\ \A w \in Workers : SF_vars(\E v \in Versions : Receive(w, v))

\* Without that assumption, steps that follow one another without a pause keep the version out forever.
WithoutTurns == Init /\ [][Next]_vars /\ Progress /\ \A w \in Workers : WF_vars(\E v \in Versions : Receive(w, v))

-----------------------------------------------------------------------------
(* What holds *)

\* No step begins with a version that is more than Limit behind what its worker had heard of by then, nor with none.
NeverTooStale == \A w \in Workers : pc[w] = "stepping" => served[w] >= floor[w]
NoStepWithoutWeights == \A w \in Workers : pc[w] = "stepping" => served[w] # 0

\* Each result names the versions that it was made with.
ResultsNameTheirVersions == \A w \in Workers : \A i \in DOMAIN results[w] : results[w][i].named

\* A worker never has more results in flight than its channel's capacity, and each that is taken makes room for one.
ChannelIsBounded ==
  \A w \in Workers : room[w] + Cardinality({i \in DOMAIN results[w] : results[w][i].life = life[w]}) = Capacity

\* A send ends with true answers: whoever owes none serves the newest version, but for those that are starting.
AnsweredMeansServed == \A w \in Alive : w \in owed \/ pc[w] = "starting" \/ served[w] = version

\* The trainer's wait ends, also when it takes no results meanwhile.
EverySendEnds == awaits ~> ~awaits

\* Every worker serves the newest version in the end, also when the trainer does nothing but take results.
TheNewestArrives == owed # {} ~> owed = {}

\* A worker that waits for a newer version gets it, also when the trainer sends nothing more.
NobodyWaitsForEver == [](\A w \in Workers : pc[w] = "between" => <>(pc[w] # "between"))

-----------------------------------------------------------------------------
(* Canaries *)

\* A worker has to wait at its gate.
NobodyIsStale == \A w \in Workers : pc[w] = "between" => announced[w] - served[w] <= Limit

\* A result is made with two versions.
OneVersionEach == \A w \in Workers : Cardinality(truth[w]) <= 1

\* The trainer waits while a worker waits for room.
NobodyWaitsForRoom == \A w \in Workers : ~(awaits /\ pc[w] = "putting" /\ room[w] = 0)

\* A worker waits at its gate for a version that waits in the trainer.
NobodyWaitsForWhatWaits == \A w \in waits : ~(pc[w] = "between" /\ updates = {} /\ announced[w] - served[w] > Limit)
=============================================================================
