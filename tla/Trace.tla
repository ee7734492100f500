------------------------------- MODULE Trace -------------------------------
(***************************************************************************)
(* Recorded runs, followed action by action.  TraceData.tla is written by  *)
(* weightsync verify: for each run the actions that it took, and what the  *)
(* machine that took each was afterwards.  A run that TLC follows to its   *)
(* end is printed as ACCEPT; there is one behaviour for each that conforms.*)
(***************************************************************************)
EXTENDS AckProtocol, Sequences, TLC, TraceData

VARIABLES run, at   \* which run, and its next event

traced == <<sstate, sdata, slife, blocked, rstate, rdata, messages, answers, gone, run, at>>

\* The action of an event. If a sender gives up a link, its other end may have been closed or not.
Acts(e) ==
  CASE e.a = "Copy"           -> Copy(e.s, e.t)
    [] e.a = "Connect"        -> Connect(e.s, e.c)
    [] e.a = "SendAll"        -> SendAll(e.s)
    [] e.a = "SendTo"         -> SendTo(e.s, e.ws)
    [] e.a = "SendAsyncAll"   -> SendAsyncAll(e.s)
    [] e.a = "SendAsyncTo"    -> SendAsyncTo(e.s, e.ws)
    [] e.a = "Wait"           -> Wait(e.s)
    [] e.a = "Deadline"       -> Deadline(e.s)
    [] e.a = "Interrupted"    -> Interrupted(e.s)
    [] e.a = "Abandon"        -> Abandon(e.s)
    [] e.a = "CloseSender"    -> CloseSender(e.s)
    [] e.a = "Join"           -> Join(e.s, e.w)
    [] e.a = "Remove"         -> Remove(e.s, e.w)
    [] e.a = "Lost"           -> Notice(e.s, e.w) \/ GiveUp(e.s, e.w)
    [] e.a = "AnswerHello"    -> AnswerHello(e.s, e.w, e.k)
    [] e.a = "AnswerAck"      -> AnswerAck(e.s, e.w, e.k, e.n)
    [] e.a = "AnswerRefusal"  -> AnswerRefusal(e.s, e.w, e.k, e.n, e.kind)
    [] e.a = "AnswerRejected" -> AnswerRejected(e.s, e.w, e.k, e.kind)
    [] e.a = "AnswerBye"      -> AnswerBye(e.s, e.w, e.k)
    [] e.a = "HelloArrived"   -> HelloArrived(e.w, e.s, e.k)
    [] e.a = "Misfit"         -> Misfit(e.w, e.s, e.k)
    [] e.a = "UpdateArrived"  -> UpdateArrived(e.w, e.s, e.k, e.n)
    [] e.a = "Applied"        -> Applied(e.w)
    [] e.a = "Defer"          -> Defer(e.w)
    [] e.a = "SendAck"        -> SendAck(e.w)
    [] e.a = "Refused"        -> Refused(e.w)
    [] e.a = "Broken"         -> Broken(e.w)
    [] e.a = "Invalidate"     -> Invalidate(e.w)
    [] e.a = "Answered"       -> Answered(e.w)
    [] e.a = "LinkDown"       -> LinkDown(e.w, e.s, e.k)
    [] e.a = "LinkFailed"     -> LinkDown(e.w, e.s, e.k) \/ LinkFailed(e.w, e.s, e.k)
    [] e.a = "CloseReceiver"  -> CloseReceiver(e.w)
    [] e.a = "FailReceiver"   -> FailReceiver(e.w)
    [] e.a = "CrashReceiver"  -> CrashReceiver(e.w)

\* The expected entry of a worker: link state, link, served, due, catching, fence.
EntryIs(entry, expected) ==
  /\ entry.link_state = expected[1]
  /\ expected[1] # "NONE" =>
       <<entry.link, entry.served, entry.due, entry.catching, entry.fence>>
         = <<expected[2], expected[3], expected[4], expected[5], expected[6]>>

SenderIs(s, e) ==
  LET data == sdata'[s] IN
  /\ sstate'[s] = e.st
  /\ data.incarnation = e.inc /\ data.version = e.v /\ data.dueAll = e.all
  /\ \A w \in 1..Len(e.members) : EntryIs(data.members[w], e.members[w])
  /\ e.reported => \A w \in 1..Len(e.out) :
       /\ data.out.outcomes[w] = e.out[w]
       /\ (data.out.owed[w] # 0) = (e.out[w] = "PENDING")

KeyIs(payload, expected) == payload[1] = expected[1] /\ payload[2] = expected[2]

ReceiverIs(w, e) ==
  LET data == rdata'[w] IN
  /\ rstate'[w] = e.st
  /\ data.link = e.link /\ data.fence = e.fence /\ data.answer = e.answer
  /\ KeyIs(data.decided, e.decided) /\ KeyIs(data.pending, e.pending)
  /\ KeyIs(data.served, e.served)

Shows(e) ==
  CASE e.a \in {"Copy", "CrashReceiver"} -> TRUE
    [] e.who = "s" -> SenderIs(e.s, e)
    [] OTHER       -> ReceiverIs(e.w, e)

Follow ==
  /\ at <= Len(Traces[run])
  /\ Acts(Traces[run][at])
  /\ Shows(Traces[run][at])
  /\ at' = at + 1 /\ run' = run
  /\ at' > Len(Traces[run]) => PrintT(<<"ACCEPT", run>>)

FollowInit == Init /\ run \in 1..Len(Traces) /\ at = 1
FollowSpec == FollowInit /\ [][Follow]_traced

\* Prints how far each run was followed; only where one was not followed to its end.
Reached == PrintT(<<"REACHED", run, at - 1>>)

\* The wrapper adds nothing: each of its steps is one of the protocol's.
OnlyTheModels == [][Next]_vars
=============================================================================
