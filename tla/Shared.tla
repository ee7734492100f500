------------------------------- MODULE Shared -------------------------------
(***************************************************************************)
(* Senders that use one and the same link one after another: a trainer's   *)
(* pipe that a copy or a successor keeps using.                            *)
(*                                                                         *)
(* In AckProtocol.tla each sender opens its own links.  Here the k-th      *)
(* link to a worker is one connection that all senders share.  To its      *)
(* worker it is one link, and belongs to the sender of the newest          *)
(* handshake over it.  <<s, w, k>> is what s writes to it and what is      *)
(* written to s.  Senders, calls, the receiver's decisions and properties  *)
(* are those of AckProtocol.tla; what depends on whose link it is, is      *)
(* defined again here.                                                     *)
(*                                                                         *)
(* Abstracted: the order in which two senders' messages were written (the  *)
(* worker reads them in any order); joining after the connection closed,   *)
(* which opens a new one; receivers that close or fail, which              *)
(* AckProtocol.tla has.                                                    *)
(***************************************************************************)
EXTENDS AckProtocol

CONSTANT Careless   \* rules of this module that are removed for the revert tests; {} otherwise

SharedRules == {
  "StaleFirst",     \* an update below the fence is answered STALE, whatever version it names
  "ForceStays",     \* a handshake rejected over the link in force leaves that link as it is
  "OldIsAnswered",      \* a takeover over the link in force answers the pending update STALE: no link closes
  "FenceEnds",      \* a refusal with a fence above the sender's incarnation ends the link, whatever version it names
  "OwnGoodbye"      \* of a link's senders only the one in force ends it
}
ASSUME Careless \subseteq SharedRules
ASSUME MaxLink = 1   \* one connection to each worker: Connection(w, 1)

Follows(rule) == rule \notin Careless

\* This is the current connection.
InForce(w, k) == Link(w) # NoLink /\ Link(w)[2] = k
Connection(w, k) == {<<s, w, k>> : s \in Senders}
OffConnection(w, k) == {m \in messages : ~(m.w = w /\ m.k = k)}

\* The current link is not read while an answer is owed.
MayRead(w, k) == ~(InForce(w, k) /\ rstate[w] = "awaiting_ack")

-----------------------------------------------------------------------------
(* The receiver *)

\* A handshake was rejected: the connection closes, unless it is the current one.
Turned(w, k, m) ==
  /\ messages' = IF InForce(w, k) THEN Taken(messages, m) ELSE OffConnection(w, k)
  /\ gone' = IF InForce(w, k) /\ Follows("ForceStays") THEN gone ELSE Gone(Connection(w, k))
  /\ UNCHANGED rdata

SharedHello(w, s, k) ==
  LET m == Message(s, w, k, 0, 0)
      input == NameHello(w, s, k)
      incarnation == sdata[s].incarnation
      pending == rdata[w].pending
      stale == IF pending # NoPayload /\ Follows("OldIsAnswered")
               THEN Posted(answers, Word(Link(w)[1], w, k, pending, "STALE", incarnation)) ELSE answers IN
  /\ m \in messages /\ ReceiverMay(rstate[w], input) /\ MayRead(w, k)
  /\ ReceiverTo(w, ReceiverNext(rstate[w], input))
  /\ CASE input = "REJECTED" -> Turned(w, k, m) /\ answers' = Posted(answers, Rejection(w, s, k, "FENCED"))
       [] input = "DUPLICATE" -> messages' = Taken(messages, m) /\ UNCHANGED <<answers, gone, rdata>>
       [] OTHER ->
            /\ rdata' = [rdata EXCEPT ![w].link = <<s, k>>, ![w].fence = incarnation, ![w].met = Max(@, incarnation),
                                      ![w].decided = IF Overwritten(w) THEN NoPayload ELSE @,
                                      ![w].answer = IF Overwritten(w) THEN "NONE" ELSE @, ![w].pending = NoPayload]
            /\ messages' = Taken(messages, m)
            /\ answers' = Posted(stale, Word(s, w, k, <<incarnation, 0, 0>>, "HELLO", 0))
            /\ UNCHANGED gone
  /\ UNCHANGED sender

\* The layout does not fit. This may be a repeated handshake: the worker's model may have changed since.
SharedMisfit(w, s, k) ==
  LET m == Message(s, w, k, 0, 0)
      kind == IF sdata[s].incarnation < rdata[w].fence THEN "FENCED" ELSE "REFUSED" IN
  /\ m \in messages /\ ReceiverMay(rstate[w], "REJECTED") /\ MayRead(w, k)
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "REJECTED"))
  /\ Turned(w, k, m)
  /\ answers' = Posted(answers, Rejection(w, s, k, kind))
  /\ UNCHANGED sender

\* An update of the sender in force, or of an older one. A newer sender's waits until its Hello has been read.
SharedUpdate(w, s, k, v) ==
  \E m \in messages :
    LET key == <<sdata[s].incarnation, v, m.p>>
        input == NameUpdate(w, key)
        again == input = "DUPLICATE" /\ SameKey(key, rdata[w].decided) IN
    /\ m.w = w /\ m.s = s /\ m.k = k /\ m.v = v /\ v # 0 /\ MessageDue(m)
    /\ InForce(w, k) /\ key[1] <= rdata[w].fence /\ ReceiverMay(rstate[w], input)
    /\ ReceiverTo(w, ReceiverNext(rstate[w], input))
    /\ rdata' = IF input \in {"UPDATE", "NEWER"} THEN [rdata EXCEPT ![w].pending = key] ELSE rdata
    /\ messages' = Taken(messages, m)
    /\ answers' = CASE input = "STALE" -> Posted(answers, Word(s, w, k, key, "STALE", rdata[w].fence))
                    [] input = "NEWER" -> Posted(answers, Word(s, w, k, rdata[w].pending, "SUPERSEDED", rdata[w].fence))
                    [] again -> Posted(answers, Word(s, w, k, <<key[1], key[2], rdata[w].decided[3]>>, rdata[w].answer,
                                                     IF rdata[w].answer = "ACK" THEN 0 ELSE rdata[w].fence))
                    [] OTHER -> answers
    /\ UNCHANGED <<sender, gone>>

\* The connection ends for its worker when the sender in force ends it or, with no sender in force, when one that wrote to
\* it does. An older sender's goodbye has no effect.
SharedLinkDown(w, s, k) ==
  LET ours == Link(w) = <<s, k>> \/ (InForce(w, k) /\ ~Follows("OwnGoodbye") /\ sdata[s].incarnation # 0) IN
  /\ ours \/ (Link(w) = NoLink /\ \E m \in messages : m.w = w /\ m.s = s /\ m.k = k)
  /\ ~Open(s, w, k) \/ (May("break") /\ ~gone[s][w])
  /\ ReceiverMay(rstate[w], "LINK_DOWN")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "LINK_DOWN"))
  /\ rdata' = [rdata EXCEPT ![w].link = NoLink, ![w].pending = NoPayload]
  /\ messages' = OffConnection(w, k)
  /\ gone' = Gone(Connection(w, k))
  /\ UNCHANGED <<sender, answers>>

\* A removed rule: an older sender's update counts as a violation of the protocol.
SharedBreach(w, s, k, v) ==
  /\ Message(s, w, k, v, v) \in messages /\ v # 0 /\ InForce(w, k) /\ sdata[s].incarnation < rdata[w].fence
  /\ ReceiverMay(rstate[w], "LINK_DOWN")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "LINK_DOWN"))
  /\ rdata' = [rdata EXCEPT ![w].link = NoLink, ![w].pending = NoPayload]
  /\ messages' = OffConnection(w, k)
  /\ gone' = Gone(Connection(w, k))
  /\ UNCHANGED <<sender, answers>>

(* The sender *)

\* The worker has met a newer sender: the refusal carries its fence, whatever version it names.
Fences(m) == m.fence > m.inc /\ Follows("FenceEnds")
NameRefusal(s, m) ==
  IF Current(s, m.w, m.k) /\ m.inc = sdata[s].incarnation /\ Fences(m) THEN Settling(s, m.w, m.k, "LOST")
  ELSE NameAnswer(s, m)

SharedRefusal(s, w, k, v, kind) ==
  \E m \in answers :
    LET input == NameRefusal(s, m)
        ends == Fences(m) /\ input # "STALE" IN
    /\ v # 0 /\ m.s = s /\ m.w = w /\ m.k = k /\ m.v = v /\ m.kind = kind /\ AnswerDue(m)
    /\ IF ends THEN End(s, w, k, "LOST", m.fence, input)
       ELSE Took(s, input) /\ Count(s, m, "REFUSED", input) /\ UNCHANGED gone
    /\ answers' = IF ends THEN AnswersLeft(s, {w}) \ {m} ELSE Taken(answers, m)
    /\ messages' = IF ends THEN MessagesLeft(s, {w}) ELSE messages
    /\ UNCHANGED <<slife, receiver>>

-----------------------------------------------------------------------------

SharedNext ==
  \/ \E s \in Others, t \in Others : Copy(s, t)
  \/ \E s \in If("death", Senders) : Die(s)
  \/ \E s \in Senders, c \in 1..MaxClock : Connect(s, c)
  \/ \E s \in Senders, w \in Workers : Join(s, w)
  \/ \E s \in Senders : SendAll(s)
  \/ \E s \in If("async", Senders) : SendAsyncAll(s)
  \/ \E s \in Senders : Wait(s)
  \/ \E s \in If("deadline", Senders) : Deadline(s)
  \/ \E s \in If("abandon", Senders) : Abandon(s)
  \/ \E s \in If("close", Senders) : CloseSender(s)
  \/ \E s \in Senders, w \in Workers : Notice(s, w)
  \/ \E s \in Senders, w \in Workers, k \in Links : AnswerHello(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links, v \in Versions : AnswerAck(s, w, k, v)
  \/ \E s \in Senders, w \in Workers, k \in Links, v \in Versions, kind \in Refusals : SharedRefusal(s, w, k, v, kind)
  \/ \E s \in Senders, w \in Workers, k \in Links, kind \in Rejections : AnswerRejected(s, w, k, kind)
  \/ \E w \in Workers, s \in Senders, k \in Links : SharedHello(w, s, k)
  \/ \E w \in If("misfit", Workers), s \in Senders, k \in Links : SharedMisfit(w, s, k)
  \/ \E w \in Workers, s \in Senders, k \in Links, v \in Versions : SharedUpdate(w, s, k, v)
  \/ \E w \in Workers : Applied(w)
  \/ \E w \in If("refuse", Workers) : Refused(w)
  \/ \E w \in Workers : Answered(w)
  \/ \E w \in Workers, s \in Senders, k \in Links : SharedLinkDown(w, s, k)
  \/ \E s \in If("stray", Senders), t \in Senders, w \in Workers, k \in Links : Stray(s, t, w, k)
  \/ \E w \in (IF Follows("StaleFirst") THEN {} ELSE Workers), s \in Senders, k \in Links, v \in Versions :
        SharedBreach(w, s, k, v)

-----------------------------------------------------------------------------

\* An older sender's message over the current link changes nothing for the newer one.
OldSendersHarmNobody ==
  [][\A m \in messages \ messages' :
       LET t == Link(m.w)[1] IN
       InForce(m.w, m.k) /\ sdata[m.s].incarnation < rdata[m.w].fence /\ UNCHANGED sender =>
       /\ Open(t, m.w, m.k) => rstate'[m.w] = rstate[m.w] /\ rdata'[m.w] = rdata[m.w]
       /\ gone'[t][m.w] = gone[t][m.w]]_vars

\* The current connection goes down only when its sender closes it or dies.
OnlyItsSenderEndsIt ==
  [][\A w \in Workers : Link(w) # NoLink /\ rdata'[w].link = NoLink =>
       May("break") \/ ~Open(Link(w)[1], w, Link(w)[2])]_vars

\* A sender that hears of a newer sender over its link loses the link and keeps the fence.
FencedSendersAreNotified ==
  [][\A m \in answers \ answers' :
       LET e == sdata'[m.s].members[m.w]
           own == m.inc = sdata[m.s].incarnation /\ Open(m.s, m.w, m.k) /\ Keeps(m.s)
           misrouted == \E n \in answers' \ answers : n.inc = m.inc /\ n.s # m.s IN
       own /\ ~misrouted /\ m.fence > m.inc => e.link_state = "LOST" /\ e.fence = m.fence]_vars

\* Canaries. An older sender is refused over the link in force.
StaleBelowTheFence == \E m \in answers : m.kind = "STALE" /\ m.fence > m.inc
NobodyIsStale == ~StaleBelowTheFence
TakeoverOverOneLink == \E w \in Workers : Link(w) # NoLink /\ Link(w)'[2] = Link(w)[2] /\ Link(w)'[1] # Link(w)[1]
NobodyTakesOver == [][~TakeoverOverOneLink]_vars
\* A refusal ends the link even if it names a version other than the outstanding one.
EndedByAnother == \E m \in answers : m.v # 0 /\ m.v # sdata[m.s].version /\ m.fence > m.inc
                                     /\ m.inc = sdata[m.s].incarnation /\ Owes(m.s, m.w)
NobodyIsEndedByAnother == ~EndedByAnother
\* A repeated handshake is refused, though it was accepted before.
MisfitAgain == \E m \in answers : m.kind = "REFUSED" /\ m.v = 0 /\ Link(m.w) = <<m.s, m.k>>
NoMisfitAgain == ~MisfitAgain

SharedReads(w) ==
  \E s \in Senders, k \in Links : SharedHello(w, s, k) \/ \E v \in Versions : SharedUpdate(w, s, k, v)
SharedHears(s, w) == \E k \in Links :
  \/ AnswerHello(s, w, k)
  \/ \E v \in Versions : AnswerAck(s, w, k, v)
  \/ \E kind \in Rejections : AnswerRejected(s, w, k, kind)
  \/ \E v \in Versions, kind \in Refusals : SharedRefusal(s, w, k, v, kind)

SharedWorld ==
  /\ \A w \in Workers : WF_vars(SharedReads(w)) /\ WF_vars(Applied(w)) /\ WF_vars(Answered(w))
  /\ \A s \in Senders, w \in Workers : WF_vars(SharedHears(s, w)) /\ WF_vars(Notice(s, w))

SharedSpec == Init /\ [][SharedNext]_vars
SharedBySpeech == SharedSpec /\ SharedWorld
=============================================================================
