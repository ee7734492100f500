--------------------------------- MODULE MC ---------------------------------
(***************************************************************************)
(* The module TLC runs: AckProtocol, and canaries.  A canary claims that   *)
(* an interesting situation never occurs.  TLC must refute it, or the      *)
(* proofs would be vacuous.  First situations of one state, then those of  *)
(* a step; MCHunt.tla watches for the same ones.                           *)
(***************************************************************************)
EXTENDS AckProtocol

AllApplied(s) == \A w \in Members(s) : sdata[s].out.outcomes[w] = "APPLIED"
Outcome(s, w) == sdata[s].out.outcomes[w]
LostLink(s, w) == sdata[s].members[w].link_state = "LOST"
Serves(w, s, v) == sdata[s].incarnation # 0 /\ rdata[w].served[1] = sdata[s].incarnation /\ rdata[w].served[2] = v
NewAnswer(kind) == \E m \in answers' : m \notin answers /\ m.kind = kind

\* A copy with a lower incarnation than its original is refused at the handshake with the fence.
Fenced == \E s \in Senders, w \in Workers : sdata[s].members[w].fence # 0
NoneIsFenced == ~Fenced

\* A worker dies during a send and is reported LOST; its next life serves the same version.
CrashThenRecovery == \E s \in Senders, w \in Workers :
  /\ Outcome(s, w) = "LOST" /\ sdata[s].members[w].link_state = "UP" /\ sdata[s].members[w].link = 2
  /\ sdata[s].members[w].served = sdata[s].out.version
NoCrashThenRecovery == ~CrashThenRecovery

\* A newer version overtakes one not yet applied.
Superseded == \E m \in answers : m.kind = "SUPERSEDED"
NothingSuperseded == ~Superseded

\* A working worker was given up; it rejoins on a new link and serves the next version.
ReturnAfterWrongLoss == \E s \in Senders, w \in Workers : sdata[s].members[w].link = 2 /\ Outcome(s, w) = "APPLIED"
NoReturnAfterWrongLoss == ~ReturnAfterWrongLoss

\* Every worker is lost.
AllLost == \E s \in Senders : sdata[s].version > 0 /\ \A w \in Members(s) : LostLink(s, w)
SomebodyIsLeft == ~AllLost

\* A dispatch reaches one target and not another, whose link is closed at the far end.
PartialDispatch == \E s \in Senders :
  (\E w \in Workers : Outcome(s, w) = "LOST") /\ (\E w \in Workers : Outcome(s, w) = "APPLIED")
NoPartialDispatch == ~PartialDispatch

\* A handshake is refused for its layout.
MisfitSaid == \E m \in answers : m.kind = "REFUSED" /\ m.v = 0
NoMisfit == ~MisfitSaid

\* A link ends because something failed at its worker, which reports it.
FailureSaid == \E m \in answers : m.kind = "FAILED"
NothingFails == ~FailureSaid

\* ABANDONED means unknown: that version is applied all the same.
AbandonedApplied == \E s \in Senders, w \in Workers :
  Outcome(s, w) = "ABANDONED" /\ Serves(w, s, sdata[s].out.version)
AbandonedMeansNot == ~AbandonedApplied

\* LOST means unknown: that version is applied all the same.
LostApplied == \E s \in Senders, w \in Workers : Outcome(s, w) = "LOST" /\ Serves(w, s, sdata[s].out.version)
LostMeansNot == ~LostApplied

\* A fenced sender closes; its successor, which was given the fence, takes the worker back.
WonBack == 3 \in Senders /\ sstate[2] = Final /\ sdata[2].members[1].fence # 0 /\ Serves(1, 3, 1)
NobodyWinsBack == ~WonBack

\* An answer meant for another sender arrives, and is ignored.
StrayAnswer == \E m \in answers : m.inc # sdata[m.s].incarnation
NoStrayAnswer == ~StrayAnswer

\* An older version arrives after a newer one.
Overtaken == \E m \in answers : m.kind = "STALE"
NothingLate == ~Overtaken

\* A trainer dies with its update outstanding; its successor's first version is served.
Successor == \E s \in Senders, w \in Workers :
  s > 1 /\ slife[1] = "dead" /\ sdata[1].version > 0 /\ Serves(w, s, 1)
NoSuccessor == ~Successor

\* A message is lost, and a deadline ends the wait.
Loss == \E s \in Senders :
  /\ sstate[s] = "pending_async" /\ messages = {} /\ answers = {}
  /\ \E w \in Owing(s) : Link(w) = <<s, sdata[s].out.owed[w]>> /\ rstate[w] = "ready"
NoLoss == ~Loss

-----------------------------------------------------------------------------

\* An ack that is not owed arrives, and is ignored.
StaleAck == \E m \in answers : m.kind = "ACK" /\ NameAnswer(m.s, m) = "STALE" /\ AnswerAck(m.s, m.w, m.k, m.v)
NoStaleAck == [][~StaleAck]_vars

\* An ack arrives after the deadline, and counts.
AckAfterDeadline == \E s \in Senders, w \in Workers :
  sstate[s] = "pending_async" /\ Counted(s, w) /\ sdata'[s].out.outcomes[w] = "APPLIED"
NoAckAfterDeadline == [][~AckAfterDeadline]_vars

\* A copy takes over the worker from its original, which notices its lost link.
Takeover == \E w \in Workers : Link(w)[1] # 0 /\ Link(w)'[1] # 0 /\ Link(w)'[1] # Link(w)[1]
NoTakeover == [][~Takeover]_vars

\* A version is refused, and the next one applied by the same worker.
SuccessAfterRefusal == \E w \in Workers : rdata[w].answer = "REFUSED" /\ rdata'[w].answer = "ACK"
NoSuccessAfterRefusal == [][~SuccessAfterRefusal]_vars

\* A late joiner serves a version that was sent before it joined, and acks it over its link.
CatchesUp == \E s \in Senders, w \in Workers :
  sdata[s].members[w].catching # 0 /\ sdata'[s].members[w].served = sdata[s].members[w].catching
NobodyCatchesUp == [][~CatchesUp]_vars

\* A takeover drops what was pending.
PendingDropped == \E w \in Workers : rstate[w] = "pending_async" /\ rstate'[w] = "ready"
NoPendingDropped == [][~PendingDropped]_vars

\* The sender is closed while a caller waits.
ClosedUpon == \E s \in Senders : blocked[s] /\ sstate'[s] = Final
NobodyClosedUpon == [][~ClosedUpon]_vars

\* A duplicate of what was decided is answered again.
SecondAnswer == \E w \in Workers : rstate[w] = rstate'[w] /\ NewAnswer("ACK")
NoSecondAnswer == [][~SecondAnswer]_vars

\* A wait is interrupted, and a later one finds that every target has applied.
SuccessAfterInterrupt == \E s \in Senders : sstate[s] = "pending_async" /\ sstate'[s] = "ready" /\ AllApplied(s)
NoSuccessAfterInterrupt == [][~SuccessAfterInterrupt]_vars

\* A swap fails half way: nothing is served.
Breaks == \E w \in Workers : rdata[w].served # NoPayload /\ rdata'[w].served = NoPayload
NothingBreaks == [][~Breaks]_vars

\* The user writes other weights, and the worker serves the next version all the same.
ServesAgain == \E w \in Workers :
  May("invalidate") /\ rdata[w].served = NoPayload /\ rdata[w].decided # NoPayload /\ rdata'[w].served # NoPayload
NobodyServesAgain == [][~ServesAgain]_vars

\* A deferred answer is sent over another link than its update arrived on.
DeferredElsewhere == \E w \in Workers :
  rdata[w].answer = "DEFERRED" /\ rdata[w].link # NoLink /\ rstate[w] # "awaiting_ack" /\ NewAnswer("ACK")
NothingDeferredElsewhere == [][~DeferredElsewhere]_vars

\* An answer cannot be sent: the link goes down.
UnsentAnswer == \E w \in Workers : rstate[w] = "awaiting_ack" /\ rstate'[w] = "uninitialized"
EveryAnswerLeaves == [][~UnsentAnswer]_vars

\* A wider send that was abandoned reaches a worker that the later send does not name.
WiderSend == \E s \in Senders, w \in Workers :
  sdata[s].out.version = 2 /\ Outcome(s, w) = "NONE" /\ rdata'[w].served # rdata[w].served /\ Serves(w, s, 1)'
OnlyTheLatestSendChanges == [][~WiderSend]_vars

\* A receiver says Bye, and is removed by a sender that is waiting for it.
ByeWhileOwing == \E s \in Senders, w \in Workers : Owes(s, w) /\ sdata'[s].members[w].link_state = "NONE"
NoBye == [][~ByeWhileOwing]_vars

\* A worker that reported a failure is LOST, remains among the workers, and rejoins on a new link.
BackAfterFailure == \E s \in Senders, w \in Workers :
  /\ Outcome(s, w) = "LOST" /\ sdata[s].members[w].link = 2 /\ ~May("break") /\ ~May("wrong") /\ ~May("crash")
  /\ sdata[s].members[w].link_state = "EXPECTED" /\ sdata'[s].members[w].link_state = "UP"
NobodyIsBackAfterFailure == [][~BackAfterFailure]_vars

\* TLC must find this false.
Impossible == sstate # sstate
=============================================================================
