----------------------------- MODULE WeightSync -----------------------------
(***************************************************************************)
(* The promise of weightsync to its user: which weights each               *)
(* worker serves, which update each sender has outstanding, and what its   *)
(* report says of each worker.  No messages, links or acks: AckProtocol    *)
(* shows how the promise is kept, and TLC checks that each of its steps is *)
(* a step of this module.                                                  *)
(***************************************************************************)
EXTENDS Integers

CONSTANTS Senders, Workers, MaxVersion

VARIABLES
  served,        \* served[w]: <<incarnation, version>>; <<0, 0>>: none
  incarnation,   \* incarnation[s]: 0 until the sender connects, then its own
  phase,         \* phase[s]: idle, outstanding, waited (and a caller is blocked), closed, dead
  version,       \* version[s]: the newest dispatched
  outcome,       \* outcome[s][w]: of the outstanding update, or of the last one
  did            \* did[s]: the workers that have served the outstanding update

vars == <<served, incarnation, phase, version, outcome, did>>
sender == <<incarnation, phase, version, outcome, did>>

None == <<0, 0>>
Newer(a, b) == a[1] > b[1] \/ (a[1] = b[1] /\ a[2] > b[2])
Pending(s) == {w \in Workers : outcome[s][w] = "PENDING"}

Init ==
  /\ served = [w \in Workers |-> None]
  /\ incarnation = [s \in Senders |-> 0]
  /\ phase = [s \in Senders |-> "idle"]
  /\ version = [s \in Senders |-> 0]
  /\ outcome = [s \in Senders |-> [w \in Workers |-> "NONE"]]
  /\ did = [s \in Senders |-> {}]

-----------------------------------------------------------------------------

\* A sender's incarnation is unique and never changes.
Connect(s) ==
  /\ phase[s] = "idle" /\ incarnation[s] = 0
  /\ incarnation'[s] # 0
  /\ \A t \in Senders \ {s} : incarnation'[t] = incarnation[t] /\ incarnation'[s] # incarnation[t]
  /\ UNCHANGED <<served, phase, version, outcome, did>>

\* G5, G11: nothing is outstanding; the version was never used before; at least one worker can still answer.
Send(s, targets, lost, refused, how) ==
  /\ phase[s] = "idle" /\ incarnation[s] # 0
  /\ lost \cup refused \subseteq targets /\ lost \cup refused # targets /\ lost \cap refused = {}
  /\ version' = [version EXCEPT ![s] = @ + 1]
  /\ phase' = [phase EXCEPT ![s] = how]
  /\ outcome' = [outcome EXCEPT ![s] =
       [w \in Workers |-> CASE w \in lost -> "LOST"
                            [] w \in refused -> "REFUSED"
                            [] w \in targets \ (lost \cup refused) -> "PENDING"
                            [] OTHER -> "NONE"]]
  /\ did' = [did EXCEPT ![s] = {}]
  /\ UNCHANGED <<served, incarnation>>

\* G4: a worker serves a version that was sent and is newer than its own; its sender may be closed or dead by then.
Serve(w, s, v) ==
  /\ incarnation[s] # 0 /\ v <= version[s] /\ Newer(<<incarnation[s], v>>, served[w])
  /\ served' = [served EXCEPT ![w] = <<incarnation[s], v>>]
  /\ did' = IF v = version[s] /\ phase[s] \in {"outstanding", "waited"} THEN [did EXCEPT ![s] = @ \cup {w}] ELSE did
  /\ UNCHANGED <<incarnation, phase, version, outcome>>

\* Its process died, a swap could not be undone, or the user wrote other weights.
Forget(w) ==
  /\ served' = [served EXCEPT ![w] = None]
  /\ UNCHANGED sender

\* G1, G2: APPLIED only for a worker that has served it. The last answer ends a wait, and only a wait.
Answer(s, w, o) ==
  LET ends == phase[s] = "waited" /\ Pending(s) = {w} IN
  /\ w \in Pending(s) /\ (o = "APPLIED" => w \in did[s])
  /\ outcome' = [outcome EXCEPT ![s][w] = o]
  /\ phase' = [phase EXCEPT ![s] = IF ends THEN "idle" ELSE @]
  /\ did' = [did EXCEPT ![s] = IF ends THEN {} ELSE @]
  /\ UNCHANGED <<served, incarnation, version>>

\* The caller waits for the outstanding update; if no worker owes an answer any more, the report is available at once.
Wait(s) ==
  /\ phase[s] = "outstanding"
  /\ phase' = [phase EXCEPT ![s] = IF Pending(s) = {} THEN "idle" ELSE "waited"]
  /\ did' = [did EXCEPT ![s] = IF Pending(s) = {} THEN {} ELSE @]
  /\ UNCHANGED <<served, incarnation, version, outcome>>

\* A deadline or an exception ends the wait, not the update.
StopWaiting(s) ==
  /\ phase[s] = "waited"
  /\ phase' = [phase EXCEPT ![s] = "outstanding"]
  /\ UNCHANGED <<served, incarnation, version, outcome, did>>

\* The caller abandons the update, or closes the sender. G9: for good.
GiveUp(s, to) ==
  /\ to = "closed" \/ phase[s] = "outstanding"
  /\ phase[s] \notin {"closed", "dead"}
  /\ phase' = [phase EXCEPT ![s] = to]
  /\ outcome' = [outcome EXCEPT ![s] = [w \in Workers |-> IF w \in Pending(s) THEN "ABANDONED" ELSE outcome[s][w]]]
  /\ did' = [did EXCEPT ![s] = {}]
  /\ UNCHANGED <<served, incarnation, version>>

\* The trainer's process dies; there is no caller left to report to.
Die(s) ==
  /\ phase' = [phase EXCEPT ![s] = "dead"]
  /\ outcome' = [outcome EXCEPT ![s] = [w \in Workers |-> "NONE"]]
  /\ did' = [did EXCEPT ![s] = {}]
  /\ UNCHANGED <<served, incarnation, version>>

-----------------------------------------------------------------------------

Next ==
  \/ \E s \in Senders : Connect(s) \/ Wait(s) \/ StopWaiting(s) \/ Die(s)
  \/ \E s \in Senders, to \in {"idle", "closed"} : GiveUp(s, to)
  \/ \E s \in Senders, w \in Workers, o \in {"APPLIED", "REFUSED", "LOST"} : Answer(s, w, o)
  \/ \E w \in Workers, s \in Senders, v \in 1..MaxVersion : Serve(w, s, v)
  \/ \E w \in Workers : Forget(w)
  \/ \E s \in Senders, how \in {"outstanding", "waited"}, targets \in SUBSET Workers, lost \in SUBSET Workers,
        refused \in SUBSET Workers : Send(s, targets, lost, refused, how)

\* The same as [][Next]_vars. TLC tries Next first, and most steps of the protocol change nothing here.
Spec == Init /\ [][(UNCHANGED vars) \/ Next]_vars

\* G10. A waiting caller is released. It is no part of Spec, which has no fairness: TLC checks it as EverySendEnds of
\* AckProtocol.
EverySendEnds == \A s \in Senders : phase[s] = "waited" ~> phase[s] # "waited"
=============================================================================
