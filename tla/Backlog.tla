------------------------------ MODULE Backlog ------------------------------
(***************************************************************************)
(* How far a sender runs ahead of a worker that does not read: the backlog *)
(* of one link, weightsync/engine/sender_driver.py.                        *)
(*                                                                         *)
(* A link carries at most two unanswered updates.  A newer one             *)
(* waits in the sender.  If a still newer one follows, it replaces the     *)
(* waiting one, which is then never sent: no answer to it is               *)
(* owed, because it was abandoned before the newer one was                 *)
(* dispatched.  In AckProtocol.tla every update is sent. An update that is *)
(* never sent is modelled there as a lost message; safety is proved for    *)
(* lossy links (the configuration MCBestEffort). That sends end            *)
(* nevertheless is proved here.                                            *)
(*                                                                         *)
(* Abstracted: what the worker does between reading and answering; Hellos; *)
(* links that end, with which their backlog ends.  Links that may lose     *)
(* have no backlog.                                                        *)
(***************************************************************************)
EXTENDS Integers, FiniteSets

CONSTANTS
  MaxVersion,  \* dispatches
  Reorders,    \* a message may overtake another
  Careless     \* rules removed for the revert tests; {} otherwise

AllRules == {
  "TwoAtMost",         \* an update behind two unanswered ones waits
  "NewestWaits",       \* a newer one replaces a waiting one
  "OvertakenIsDropped",\* and the replaced one is dropped
  "AnswersAdmit",      \* an answer lets the waiting update be sent
  "OneOutstanding"     \* the next is dispatched when nothing is outstanding
}
ASSUME Careless \subseteq AllRules
ASSUME MaxVersion \in Nat /\ Reorders \in BOOLEAN

VARIABLES
  newest,      \* the newest version dispatched over this link
  owed,        \* the one outstanding, if its worker owes an answer; else 0
  unanswered,  \* the versions that were sent and not answered, as the sender counts them
  waiting,     \* the version that waits behind them: at most one
  messages,     \* on their way to the worker, or with it
  answers      \* on their way back

vars == <<newest, owed, unanswered, waiting, messages, answers>>

Versions == 1..MaxVersion
Room == 2
Follows(rule) == rule \notin Careless
Full(counted) == Cardinality(counted) >= Room
First(set, v) == v \in IF Reorders THEN set ELSE {u \in set : \A x \in set : u <= x}

Init == newest = 0 /\ owed = 0 /\ unanswered = {} /\ waiting = {} /\ messages = {} /\ answers = {}

\* Backlog.admit. Versions between went to other workers.
Dispatch(v) ==
  LET waits == Full(unanswered) /\ Follows("TwoAtMost")
      takes == waiting = {} \/ Follows("NewestWaits") \/ ~Follows("OvertakenIsDropped")
      kept == {u \in waiting : ~Follows("OvertakenIsDropped") \/ ~Follows("NewestWaits")} IN
  /\ v > newest /\ (owed = 0 \/ ~Follows("OneOutstanding"))
  /\ newest' = v /\ owed' = v
  /\ waiting' = IF waits THEN kept \cup {u \in {v} : takes} ELSE waiting
  /\ messages' = IF waits THEN messages ELSE messages \cup {v}
  /\ unanswered' = IF waits THEN unanswered ELSE unanswered \cup {v}
  /\ UNCHANGED answers

Abandon(v) ==
  /\ owed = v
  /\ owed' = 0
  /\ UNCHANGED <<newest, unanswered, waiting, messages, answers>>

\* The worker has read it, and sends its answer.
Answer(v) ==
  /\ First(messages, v)
  /\ messages' = messages \ {v}
  /\ answers' = answers \cup {v}
  /\ UNCHANGED <<newest, owed, unanswered, waiting>>

\* Backlog.answered. An answer counts for all updates sent before.
Hear(v) ==
  LET left == {u \in unanswered : u > v}
      leaves == {u \in waiting : ~Full(left) /\ Follows("AnswersAdmit") /\ \A x \in waiting : u <= x} IN
  /\ First(answers, v)
  /\ answers' = answers \ {v}
  /\ owed' = IF owed = v THEN 0 ELSE owed
  /\ waiting' = waiting \ leaves
  /\ messages' = messages \cup leaves
  /\ unanswered' = left \cup leaves
  /\ UNCHANGED newest

Next ==
  \/ \E v \in Versions : Dispatch(v)
  \/ \E v \in Versions : Abandon(v)
  \/ \E v \in Versions : Answer(v)
  \/ \E v \in Versions : Hear(v)

-----------------------------------------------------------------------------

\* A worker that does not read costs no more than two versions on its link. On a link that reorders, more: an answer
\* counts for all before it, though one of them may still be on its way.
AtMostTwo == Cardinality(messages \cup answers) <= Room

\* The order is kept, and a replaced version is never sent.
OnlyTheNewestLeaves == [][\A v \in messages' \ messages : v = newest']_vars

\* No answer is owed for a version that will never be sent.
NobodyIsOwedTheOvertaken == [][\A v \in waiting \ (waiting' \cup messages') : owed # v]_vars

\* A waiting version is sent or replaced.
WhatWaitsLeaves == \A v \in Versions : v \in waiting ~> v \notin waiting

\* A backlog keeps no caller waiting.
EveryUpdateIsAnswered == \A v \in Versions : owed = v ~> owed # v

\* The canary: no version is ever replaced.
NothingIsOvertaken == [][waiting \subseteq (waiting' \cup messages')]_vars

Fair == WF_vars(\E v \in Versions : Answer(v)) /\ WF_vars(\E v \in Versions : Hear(v))
Spec == Init /\ [][Next]_vars /\ Fair
=============================================================================
