------------------------------- MODULE Ends --------------------------------
(***************************************************************************)
(* The machines of AckProtocol at the two ends of a transport, for the     *)
(* families of transports to extend.  The rules of the machines stay in    *)
(* AckProtocol: here its actions are taken twice, once with the sender's   *)
(* side of the links in place of the network and once with the worker's.   *)
(*                                                                         *)
(*   outbox  messages that a sender has put on its link                    *)
(*   inbox   messages that have arrived completely, for the worker to read *)
(*   said    answers that a worker has put on its link                     *)
(*   heard   answers that have arrived completely, for the sender to read  *)
(*                                                                         *)
(* Each family defines how a message gets from one to the other.  It       *)
(* defines which messages and answers are in transit, and TLC checks that  *)
(* its steps are steps of AckProtocol, or change nothing in it.            *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, Sequences, Tables

CONSTANTS
  Senders, Workers, MaxVersion, MaxLink, MaxClock, Features,   \* as in AckProtocol
  Delivery,    \* the delivery that the family's transports declare: a name of Deliveries
  Careless     \* rules of the family that are removed for the revert tests; {} otherwise

VARIABLES
  sstate, sdata, slife, blocked, rstate, rdata,   \* as in AckProtocol
  gone,        \* gone[s][w]: the worker's end of the sender's open link is closed
  outbox, inbox, said, heard

machines == <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, said, heard>>

Declared == CHOOSE d \in Deliveries : d.name = Delivery
Follows(rule) == rule \notin Careless

S == INSTANCE AckProtocol WITH
  messages <- outbox, answers <- heard,
  Reorders <- Declared.reorders, Duplicates <- Declared.duplicates, Loses <- Declared.loses, Lingers <- TRUE,
  Without <- {}, Unfair <- {}

R == INSTANCE AckProtocol WITH
  messages <- inbox, answers <- said,
  Reorders <- Declared.reorders, Duplicates <- Declared.duplicates, Loses <- Declared.loses, Lingers <- TRUE,
  Without <- {}, Unfair <- {}

-----------------------------------------------------------------------------
(* Links, and what is on them *)

Links == 1..MaxLink
Ends == Senders \X Workers \X Links
End(m) == <<m.s, m.w, m.k>>
Open(l) == S!Open(l[1], l[2], l[3])
On(box, l) == {m \in box : End(m) = l}
Off(box, ends) == {m \in box : End(m) \notin ends}
Of(s) == {l \in Ends : l[1] = s}
Current(s, w) == <<s, w, sdata[s].members[w].link>>
Laid(l) == S!Connected(l[1]) /\ (slife[l[1]] = "dead" \/ l[3] <= Current(l[1], l[2])[3])

\* What was put first; `p` rises along a link, as NothingOvertakes of AckProtocol says.
First(box) == CHOOSE m \in box : \A n \in box : m.p <= n.p

\* The links that end with a worker; those that are not open yet do not.
To(w) == {l \in Ends : l[2] = w /\ Laid(l)}

Message(l, v, p) == S!Message(l[1], l[2], l[3], v, p)

-----------------------------------------------------------------------------
(* The machines' steps. A family says of each what else it changes. *)

Init ==
  /\ S!Init
  /\ inbox = {} /\ said = {}

\* What closes nothing.
Calling(s) ==
  /\ \/ \E t \in S!Others : S!Copy(s, t)
     \/ \E c \in 1..MaxClock : S!Connect(s, c)
     \/ \E w \in Workers : S!Join(s, w)
     \/ \E w \in S!If("remove", Workers) : S!Remove(s, w)
     \/ S!SendAll(s)
     \/ \E ws \in S!If("subset", SUBSET Workers) : S!SendTo(s, ws)
     \/ \E x \in S!If("async", {s}) : S!SendAsyncAll(x)
     \/ S!Wait(s)
     \/ \E x \in S!If("deadline", {s}) : S!Deadline(x)
     \/ \E x \in S!If("interrupt", {s}) : S!Interrupted(x)
     \/ \E x \in S!If("abandon", {s}) : S!Abandon(x)
  /\ UNCHANGED <<inbox, said>>

Hearing(s, w) ==
  /\ \E k \in Links :
       \/ S!AnswerHello(s, w, k)
       \/ S!AnswerBye(s, w, k)
       \/ \E kind \in S!Rejections : S!AnswerRejected(s, w, k, kind)
       \/ \E v \in 1..MaxVersion : S!AnswerAck(s, w, k, v)
       \/ \E v \in 1..MaxVersion, kind \in S!Refusals : S!AnswerRefusal(s, w, k, v, kind)
  /\ UNCHANGED <<inbox, said>>

GivingUp(s, w) ==
  /\ S!GiveUp(s, w)
  /\ UNCHANGED <<inbox, said>>

Noticing(s, w) ==
  /\ S!Notice(s, w)
  /\ UNCHANGED <<inbox, said>>

\* The sender's process or its driver ends: its ends of all its links are closed.
Ending(s) ==
  /\ \/ \E x \in S!If("close", {s}) : S!CloseSender(x)
     \/ \E x \in S!If("death", {s}) : S!Die(x)
  /\ said' = Off(said, Of(s))
  /\ UNCHANGED inbox

Reading(w, s, k) ==
  /\ \E v \in 1..MaxVersion : R!UpdateArrived(w, s, k, v)
  /\ UNCHANGED <<outbox, heard>>

Deciding(w) ==
  /\ \/ R!Applied(w)
     \/ \E x \in S!If("refuse", {w}) : R!Refused(x)
     \/ R!Answered(w)
  /\ UNCHANGED <<outbox, heard>>

\* The steps that close worker's ends of links, and which; messages in transit to those ends are lost.
Greeting(w, s, k) == R!HelloArrived(w, s, k) /\ UNCHANGED heard
GreetingCloses(w, s, k) ==
  CASE R!NameHello(w, s, k) = "REJECTED" -> {<<s, w, k>>}
    [] R!NameHello(w, s, k) = "DUPLICATE" -> {}
    [] OTHER -> {<<R!Link(w)[1], w, R!Link(w)[2]>>}

Misfitting(w, s, k) == R!Misfit(w, s, k) /\ UNCHANGED heard

Dropping(w, s, k) ==
  /\ \/ R!LinkDown(w, s, k)
     \/ \E x \in S!If("fail", {w}) : R!LinkFailed(x, s, k)
  /\ UNCHANGED heard

Falling(w) ==
  /\ \/ \E x \in S!If("broken", {w}) : R!Broken(x)
     \/ \E x \in S!If("bye", {w}) : R!CloseReceiver(x)
     \/ \E x \in S!If("fail", {w}) : R!FailReceiver(x)
     \/ \E x \in S!If("crash", {w}) : R!CrashReceiver(x)
  /\ UNCHANGED heard
=============================================================================
