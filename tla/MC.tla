--------------------------------- MODULE MC ---------------------------------
(***************************************************************************)
(* What TLC is given: AckProtocol, and canaries.  A canary says that an    *)
(* interesting situation does not arise; TLC must find it wrong, or the    *)
(* proofs beside it would be true for no reason.                           *)
(***************************************************************************)
EXTENDS AckProtocol

AllApplied(s) == \A w \in OnRoll(s) : sdata[s].out.outcomes[w] = "APPLIED"
Outcome(s, w) == sdata[s].out.outcomes[w]
LostLink(s, w) == sdata[s].roll[w].standing = "LOST"
Serves(w, s, v) == sdata[s].incarnation # 0 /\ rdata[w].served[1] = sdata[s].incarnation /\ rdata[w].served[2] = v
NewAnswer(kind) == \E m \in answers' : m \notin answers /\ m.kind = kind

\* An ack that nobody is owed arrives, and is ignored.
NoStaleAck == [][\A m \in answers : m.kind = "ACK" /\ NameAnswer(m.s, m) = "STALE" =>
                   ~AnswerAck(m.s, m.w, m.k, m.v)]_vars

\* An ack arrives after the deadline, and counts.
NoAckAfterDeadline == [][\A s \in Senders, w \in Workers : sstate[s] = "pending_async" =>
                           ~(Counted(s, w) /\ sdata'[s].out.outcomes[w] = "APPLIED")]_vars

\* A copy of a lower incarnation than its original is refused at the handshake, and told the fence.
NoneIsFenced == \A s \in Senders, w \in Workers : sdata[s].roll[w].fence = 0

\* A copy takes the worker over from its original, which finds out by its lost link.
NoTakeover == [][\A w \in Workers : Link(w)[1] # 0 /\ Link(w)'[1] # 0 => Link(w)'[1] = Link(w)[1]]_vars

\* A worker dies in a send and is LOST to it; its next life serves that very version.
NoCrashThenRecovery == \A s \in Senders, w \in Workers :
  ~(Outcome(s, w) = "LOST" /\ sdata[s].roll[w].standing = "UP" /\ sdata[s].roll[w].link = 2
    /\ sdata[s].roll[w].served = sdata[s].out.version)

\* A version is refused, and the next one applied by the same worker.
NoSuccessAfterRefusal == [][\A w \in Workers : rdata[w].answer = "REFUSED" => rdata'[w].answer # "ACK"]_vars

\* A newer version overtakes one not yet applied.
NothingSuperseded == \A m \in answers : m.kind # "SUPERSEDED"

\* A late joiner serves the version that was sent before it came, and its link says so.
NobodyCatchesUp == [][\A s \in Senders, w \in Workers :
                        sdata[s].roll[w].catching # 0 => sdata'[s].roll[w].served # sdata[s].roll[w].catching]_vars

\* A takeover drops what was pending.
NoPendingDropped == [][\A w \in Workers : rstate[w] = "pending_async" => rstate'[w] # "ready"]_vars

\* A worker that was given up though it was well comes back on a new link and serves the next version.
NoReturnAfterWrongLoss == \A s \in Senders, w \in Workers :
  ~(sdata[s].roll[w].link = 2 /\ Outcome(s, w) = "APPLIED")

\* The sender is closed while a caller waits.
NobodyClosedUpon == [][\A s \in Senders : blocked[s] => sstate'[s] # Final]_vars

\* A duplicate of what was decided is answered again.
NoSecondAnswer == [][\A w \in Workers : rstate[w] = rstate'[w] => ~NewAnswer("ACK")]_vars

\* Every worker on the roll is lost.
SomebodyIsLeft == \A s \in Senders : sdata[s].version > 0 => \E w \in OnRoll(s) : ~LostLink(s, w)

\* A dispatch reaches one target and not another, whose link is closed at the far end.
NoPartialDispatch == \A s \in Senders :
  ~(\E w \in Workers : Outcome(s, w) = "LOST") \/ ~(\E w \in Workers : Outcome(s, w) = "APPLIED")

\* A wait is interrupted, and a later one finds that everybody has applied.
NoSuccessAfterInterrupt == [][\A s \in Senders :
                                ~(sstate[s] = "pending_async" /\ sstate'[s] = "ready" /\ AllApplied(s))]_vars

\* A swap fails half way: what was served is given up.
NothingBreaks == [][\A w \in Workers : rdata[w].served # NoPayload => rdata'[w].served # NoPayload]_vars

\* A handshake is refused for its layout.
NoMisfit == \A m \in answers : ~(m.kind = "REFUSED" /\ m.v = 0)

\* An answer cannot be sent: the link goes down.
EveryAnswerLeaves == [][\A w \in Workers : rstate[w] = "awaiting_ack" => rstate'[w] # "uninitialized"]_vars

\* ABANDONED means unknown: that version is applied all the same.
AbandonedMeansNot == \A s \in Senders, w \in Workers :
  ~(Outcome(s, w) = "ABANDONED" /\ Serves(w, s, sdata[s].out.version))

\* LOST means unknown: that version is applied all the same.
LostMeansNot == \A s \in Senders, w \in Workers : ~(Outcome(s, w) = "LOST" /\ Serves(w, s, sdata[s].out.version))

\* A wider send that was abandoned reaches a worker that the later send does not name.
OnlyTheLatestSendChanges == [][\A s \in Senders, w \in Workers :
  (sdata[s].out.version = 2 /\ Outcome(s, w) = "NONE" /\ rdata'[w].served # rdata[w].served) => ~Serves(w, s, 1)']_vars

\* A fenced sender closes, and its successor, told the fence, wins the worker back.
NobodyWinsBack == ~(3 \in Senders /\ sstate[2] = Final /\ sdata[2].roll[1].fence # 0 /\ Serves(1, 3, 1))

\* A receiver says Bye, and leaves the roll of a sender that is waiting for it.
NoBye == [][\A s \in Senders, w \in Workers : ~(Owes(s, w) /\ sdata'[s].roll[w].standing = "NONE")]_vars

\* An answer meant for another sender arrives, and is ignored.
NoStrayAnswer == \A m \in answers : m.inc = sdata[m.s].incarnation

\* An older version arrives after a newer one.
NothingLate == \A m \in answers : m.kind # "STALE"

\* A trainer dies with its update outstanding; its successor's first version is served.
NoSuccessor == \A s \in Senders, w \in Workers :
  ~(s > 1 /\ slife[1] = "dead" /\ sdata[1].version > 0 /\ Serves(w, s, 1))

\* A message is lost, and a deadline ends the wait.
NoLoss == \A s \in Senders : ~(sstate[s] = "pending_async" /\ letters = {} /\ answers = {}
                              /\ \E w \in Owing(s) : Link(w) = <<s, sdata[s].out.owed[w]>> /\ rstate[w] = "ready")

\* TLC must say no to this.
Impossible == sstate # sstate
=============================================================================
