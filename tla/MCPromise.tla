----------------------------- MODULE MCPromise -----------------------------
(***************************************************************************)
(* Steps that the promise must not allow, at least one for each clause of  *)
(* WeightSync.tla.  Each is a state before and a state after; TLC checks   *)
(* that no step of the promise leads from one to the other.  If a clause   *)
(* is removed from the promise, its step is allowed, and TLC reports it.   *)
(*                                                                         *)
(* The line above a step names the clause that refuses it, as it stands in *)
(* WeightSync.tla; a test compares (tests/model/tlc/test_promise.py).      *)
(***************************************************************************)
EXTENDS WeightSync, Sequences

VARIABLES
  step,   \* which of Steps
  taken   \* has it been taken?

-----------------------------------------------------------------------------

A == <<1, 1>>   \* version 1 of sender 1
B == <<1, 2>>

\* What sender 1 has; sender 2 is new.
At(serving, number, has, sent, outcomes, knows) == [
  served |-> serving, incarnation |-> <<number, 0>>, phase |-> <<has, "idle">>, version |-> <<sent, 0>>,
  outcome |-> <<outcomes, <<"NONE", "NONE">>>>, did |-> <<knows, {}>>
]
Both(numbers) == [
  served |-> <<None, None>>, incarnation |-> numbers, phase |-> <<"idle", "idle">>, version |-> <<0, 0>>,
  outcome |-> <<<<"NONE", "NONE">>, <<"NONE", "NONE">>>>, did |-> <<{}, {}>>
]

Nothing == <<None, None>>
Silent == <<"NONE", "NONE">>
New == At(Nothing, 0, "idle", 0, Silent, {})
Ready == At(Nothing, 1, "idle", 0, Silent, {})
Owed == At(Nothing, 1, "outstanding", 1, <<"PENDING", "PENDING">>, {})
OneDid == At(<<A, None>>, 1, "outstanding", 1, <<"PENDING", "PENDING">>, {1})
OneWaits == At(<<A, None>>, 1, "waited", 1, <<"PENDING", "PENDING">>, {1})
BothDid == At(<<A, A>>, 1, "outstanding", 1, <<"PENDING", "PENDING">>, {1, 2})
OneReported == At(<<A, None>>, 1, "outstanding", 1, <<"APPLIED", "PENDING">>, {1})
LastOwes == At(<<A, A>>, 1, "waited", 1, <<"APPLIED", "PENDING">>, {1, 2})
AllReported == At(<<A, None>>, 1, "outstanding", 1, <<"APPLIED", "REFUSED">>, {1})
Over == At(<<A, None>>, 1, "idle", 1, <<"APPLIED", "REFUSED">>, {})

S(before, after) == [before |-> before, after |-> after]

Steps == <<
  \* Connect: phase[s] = "idle"
  S(At(Nothing, 0, "closed", 0, Silent, {}), At(Nothing, 1, "closed", 0, Silent, {})),
  \* Connect: incarnation[s] = 0
  S(Ready, At(Nothing, 2, "idle", 0, Silent, {})),
  \* Connect: \A t \in Senders \ {s} : incarnation'[t] = incarnation[t] /\ incarnation'[s] # incarnation[t]
  S(Both(<<0, 0>>), Both(<<1, 2>>)),
  \* Connect: \A t \in Senders \ {s} : incarnation'[t] = incarnation[t] /\ incarnation'[s] # incarnation[t]
  S(Both(<<1, 0>>), Both(<<1, 1>>)),
  \* Connect: UNCHANGED <<served, phase, version, outcome, did>>
  S(New, At(Nothing, 1, "idle", 1, Silent, {})),

  \* Send: phase[s] = "idle"
  S(At(Nothing, 1, "outstanding", 1, <<"PENDING", "NONE">>, {}),
    At(Nothing, 1, "outstanding", 2, <<"PENDING", "PENDING">>, {})),
  \* Send: incarnation[s] # 0
  S(New, At(Nothing, 0, "outstanding", 1, <<"PENDING", "PENDING">>, {})),
  \* Send: lost \cup refused \subseteq targets
  S(Ready, At(Nothing, 1, "outstanding", 1, <<"LOST", "NONE">>, {})),
  \* Send: lost \cup refused # targets
  S(Ready, At(Nothing, 1, "waited", 1, <<"LOST", "LOST">>, {})),
  \* Send: version' = [version EXCEPT ![s] = @ + 1]
  S(Ready, At(Nothing, 1, "outstanding", 2, <<"PENDING", "PENDING">>, {})),
  \* Send: phase' = [phase EXCEPT ![s] = how]
  S(Ready, At(Nothing, 1, "idle", 1, <<"PENDING", "PENDING">>, {})),
  \* Send: outcome' = [outcome EXCEPT ![s] = [w \in Workers |-> CASE w \in lost -> "LOST" [] w \in refused -> "REFUSED" [] w \in targets \ (lost \cup refused) -> "PENDING" [] OTHER -> "NONE"]]
  S(Ready, At(Nothing, 1, "outstanding", 1, <<"PENDING", "APPLIED">>, {})),
  \* Send: did' = [did EXCEPT ![s] = {}]
  S(Ready, At(Nothing, 1, "outstanding", 1, <<"PENDING", "PENDING">>, {2})),
  \* Send: UNCHANGED <<served, incarnation>>
  S(Ready, At(<<A, None>>, 1, "outstanding", 1, <<"PENDING", "PENDING">>, {})),

  \* Serve: v <= version[s]
  S(Owed, At(<<B, None>>, 1, "outstanding", 1, <<"PENDING", "PENDING">>, {})),
  \* Serve: Newer(<<incarnation[s], v>>, served[w])
  S(At(<<B, None>>, 1, "idle", 2, <<"APPLIED", "APPLIED">>, {}), At(<<A, None>>, 1, "idle", 2, <<"APPLIED", "APPLIED">>, {})),
  \* Serve: served' = [served EXCEPT ![w] = <<incarnation[s], v>>]
  S(Owed, At(<<A, A>>, 1, "outstanding", 1, <<"PENDING", "PENDING">>, {1})),
  \* Serve: did' = IF v = version[s] /\ phase[s] \in {"outstanding", "waited"} THEN [did EXCEPT ![s] = @ \cup {w}] ELSE did
  S(Owed, At(<<A, None>>, 1, "outstanding", 1, <<"PENDING", "PENDING">>, {1, 2})),
  \* Serve: UNCHANGED <<incarnation, phase, version, outcome>>
  S(Owed, At(<<A, None>>, 1, "outstanding", 1, <<"APPLIED", "PENDING">>, {1})),

  \* Forget: served' = [served EXCEPT ![w] = None]
  S(At(<<A, A>>, 1, "idle", 1, <<"APPLIED", "APPLIED">>, {}), At(Nothing, 1, "idle", 1, <<"APPLIED", "APPLIED">>, {})),
  \* Forget: UNCHANGED sender
  S(OneDid, At(Nothing, 1, "outstanding", 1, <<"LOST", "PENDING">>, {1})),

  \* Answer: w \in Pending(s)
  S(OneReported, At(<<A, None>>, 1, "outstanding", 1, <<"REFUSED", "PENDING">>, {1})),
  \* Answer: o = "APPLIED" => w \in did[s]
  S(OneDid, At(<<A, None>>, 1, "outstanding", 1, <<"PENDING", "APPLIED">>, {1})),
  \* Answer: outcome' = [outcome EXCEPT ![s][w] = o]
  S(BothDid, At(<<A, A>>, 1, "outstanding", 1, <<"APPLIED", "APPLIED">>, {1, 2})),
  \* Answer: phase' = [phase EXCEPT ![s] = IF ends THEN "idle" ELSE @]
  S(At(<<A, A>>, 1, "outstanding", 1, <<"APPLIED", "PENDING">>, {}), At(<<A, A>>, 1, "idle", 1, <<"APPLIED", "REFUSED">>, {})),
  \* Answer: phase' = [phase EXCEPT ![s] = IF ends THEN "idle" ELSE @]
  S(LastOwes, At(<<A, A>>, 1, "waited", 1, <<"APPLIED", "APPLIED">>, {})),
  \* Answer: did' = [did EXCEPT ![s] = IF ends THEN {} ELSE @]
  S(OneDid, At(<<A, None>>, 1, "outstanding", 1, <<"APPLIED", "PENDING">>, {})),
  \* Answer: UNCHANGED <<served, incarnation, version>>
  S(At(<<B, None>>, 1, "outstanding", 2, <<"PENDING", "PENDING">>, {1}), At(<<B, None>>, 1, "outstanding", 1, <<"REFUSED", "PENDING">>, {1})),

  \* Wait: phase[s] = "outstanding"
  S(At(Nothing, 1, "closed", 1, <<"ABANDONED", "ABANDONED">>, {}), At(Nothing, 1, "idle", 1, <<"ABANDONED", "ABANDONED">>, {})),
  \* Wait: phase' = [phase EXCEPT ![s] = IF Pending(s) = {} THEN "idle" ELSE "waited"]
  S(AllReported, At(<<A, None>>, 1, "waited", 1, <<"APPLIED", "REFUSED">>, {})),
  \* Wait: did' = [did EXCEPT ![s] = IF Pending(s) = {} THEN {} ELSE @]
  S(OneDid, At(<<A, None>>, 1, "waited", 1, <<"PENDING", "PENDING">>, {})),
  \* Wait: UNCHANGED <<served, incarnation, version, outcome>>
  S(OneDid, At(<<A, None>>, 1, "waited", 1, <<"PENDING", "LOST">>, {1})),

  \* StopWaiting: phase[s] = "waited"
  S(Over, At(<<A, None>>, 1, "outstanding", 1, <<"APPLIED", "REFUSED">>, {})),
  \* StopWaiting: phase' = [phase EXCEPT ![s] = "outstanding"]
  S(OneWaits, At(<<A, None>>, 1, "idle", 1, <<"PENDING", "PENDING">>, {1})),
  \* StopWaiting: UNCHANGED <<served, incarnation, version, outcome, did>>
  S(OneWaits, At(<<A, None>>, 1, "outstanding", 1, <<"PENDING", "REFUSED">>, {1})),

  \* GiveUp: to = "closed" \/ phase[s] = "outstanding"
  S(OneWaits, At(<<A, None>>, 1, "idle", 1, <<"ABANDONED", "ABANDONED">>, {})),
  \* GiveUp: phase[s] \notin {"closed", "dead"}
  S(At(Nothing, 1, "dead", 1, Silent, {}), At(Nothing, 1, "closed", 1, Silent, {})),
  \* GiveUp: phase' = [phase EXCEPT ![s] = to]
  S(OneDid, At(<<A, None>>, 1, "outstanding", 1, <<"ABANDONED", "ABANDONED">>, {})),
  \* GiveUp: outcome' = [outcome EXCEPT ![s] = [w \in Workers |-> IF w \in Pending(s) THEN "ABANDONED" ELSE outcome[s][w]]]
  S(OneReported, At(<<A, None>>, 1, "idle", 1, <<"ABANDONED", "ABANDONED">>, {})),
  \* GiveUp: outcome' = [outcome EXCEPT ![s] = [w \in Workers |-> IF w \in Pending(s) THEN "ABANDONED" ELSE outcome[s][w]]]
  S(OneDid, At(<<A, None>>, 1, "closed", 1, <<"PENDING", "PENDING">>, {})),
  \* GiveUp: did' = [did EXCEPT ![s] = {}]
  S(OneDid, At(<<A, None>>, 1, "idle", 1, <<"ABANDONED", "ABANDONED">>, {1})),
  \* GiveUp: UNCHANGED <<served, incarnation, version>>
  S(OneDid, At(<<A, None>>, 1, "idle", 0, <<"ABANDONED", "ABANDONED">>, {})),

  \* Die: phase' = [phase EXCEPT ![s] = "dead"]
  S(Over, At(<<A, None>>, 1, "idle", 1, Silent, {})),
  \* Die: outcome' = [outcome EXCEPT ![s] = [w \in Workers |-> "NONE"]]
  S(OneReported, At(<<A, None>>, 1, "dead", 1, <<"APPLIED", "ABANDONED">>, {})),
  \* Die: did' = [did EXCEPT ![s] = {}]
  S(OneDid, At(<<A, None>>, 1, "dead", 1, Silent, {1})),
  \* Die: UNCHANGED <<served, incarnation, version>>
  S(OneDid, At(Nothing, 1, "dead", 1, Silent, {}))
>>

Is(state) ==
  /\ served = state.served /\ incarnation = state.incarnation /\ phase = state.phase
  /\ version = state.version /\ outcome = state.outcome /\ did = state.did

Before == step \in 1..Len(Steps) /\ taken = FALSE /\ Is(Steps[step].before)

Take ==
  /\ ~taken /\ taken' = TRUE /\ step' = step
  /\ LET state == Steps[step].after IN
     /\ served' = state.served /\ incarnation' = state.incarnation /\ phase' = state.phase
     /\ version' = state.version /\ outcome' = state.outcome /\ did' = state.did

StepsSpec == Before /\ [][Take]_<<vars, step, taken>>

\* No clause is missing: the promise refuses each step, and each changes something that the promise speaks of.
EachClauseRefuses == [][~Next /\ vars' # vars]_<<vars, step, taken>>

\* One step that the promise allows, so that EachClauseRefuses can fail: the others are refused for what they are.
Allowed == S(OneDid, At(<<A, None>>, 1, "outstanding", 1, <<"APPLIED", "PENDING">>, {1}))
TakeAllowed ==
  /\ ~taken /\ taken' = TRUE /\ step' = step
  /\ Is(Allowed.before)
  /\ LET state == Allowed.after IN
     /\ served' = state.served /\ incarnation' = state.incarnation /\ phase' = state.phase
     /\ version' = state.version /\ outcome' = state.outcome /\ did' = state.did
AllowedSpec == Before /\ [][Take \/ TakeAllowed]_<<vars, step, taken>>
=============================================================================
