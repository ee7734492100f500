------------------------------ MODULE MCPlant ------------------------------
(***************************************************************************)
(* AckProtocol with one wrong step planted, whose name is in Plant.  Each  *)
(* property that no removed rule violates has a configuration of this      *)
(* module in which TLC must find it violated, so that a property that no   *)
(* longer says anything is noticed.                                        *)
(***************************************************************************)
EXTENDS AckProtocol

CONSTANT Plant

Entries(s, w) == sdata[s].members[w]
IsOpen(s, w) == Open(s, w, Entries(s, w).link) /\ ~gone[s][w]

Rest == UNCHANGED <<slife, blocked, receiver, messages, answers, gone>>
Quiet == UNCHANGED <<sender, receiver, gone>>

\* A report contains an impossible outcome.
UnknownOutcome(s, w) == /\ sdata' = [sdata EXCEPT ![s].out.outcomes[w] = "MAYBE"] /\ UNCHANGED sstate /\ Rest

\* A worker owes what it was never sent.
OwesUnasked(s, w) == /\ ~Owes(s, w) /\ sdata' = [sdata EXCEPT ![s].out.owed[w] = 1] /\ UNCHANGED sstate /\ Rest

\* A message reaches a closed receiver.
SentToTheClosed(s, w) ==
  /\ rstate[w] = Final /\ Connected(s)
  /\ messages' = messages \cup {Message(s, w, Entries(s, w).link, 0, 0)}
  /\ UNCHANGED <<sender, receiver, answers, gone>>

\* A receiver goes where no row leads.
LeavesTheRows(w) ==
  /\ rstate[w] = "ready" /\ ReceiverTo(w, "awaiting_ack")
  /\ UNCHANGED <<sender, rdata, messages, answers, gone>>

\* An answer overtakes one that left before it.
Overtakes ==
  /\ \E m \in answers : answers' = answers \cup {[m EXCEPT !.kind = "STALE"]}
  /\ UNCHANGED messages /\ Quiet

\* A sender's version differs from the last one it has sent.
Miscounts(s) == /\ sdata' = [sdata EXCEPT ![s].serial = @ + 1] /\ UNCHANGED sstate /\ Rest

\* A receiver's fence is above every incarnation it has seen.
FenceRises(w) ==
  /\ rdata' = [rdata EXCEPT ![w].fence = @ + 1]
  /\ UNCHANGED <<sender, rstate, messages, answers, gone>>

\* A message vanishes from a link that stays.
MessageVanishes == /\ \E m \in messages : messages' = messages \ {m} /\ UNCHANGED answers /\ Quiet
AnswerVanishes == /\ \E m \in answers : answers' = answers \ {m} /\ UNCHANGED messages /\ Quiet
AnswersVanish == /\ Cardinality(answers) > 1 /\ answers' = {} /\ UNCHANGED messages /\ Quiet

\* An answer reaches a closed sender.
AnswersTheClosed(s, w) ==
  /\ sstate[s] = Final /\ Entries(s, w).link # 0
  /\ answers' = answers \cup {Word(s, w, Entries(s, w).link, <<sdata[s].incarnation, 0, 0>>, "HELLO", 0)}
  /\ UNCHANGED messages /\ Quiet

\* An ack of what was never applied.
AckInvented(s, w) ==
  /\ IsOpen(s, w) /\ rdata[w].answer # "ACK"
  /\ answers' = answers \cup {Word(s, w, Entries(s, w).link, <<sdata[s].incarnation, 1, 1>>, "ACK", 0)}
  /\ UNCHANGED messages /\ Quiet

\* A successor connects below a fence that was reported to a closed sender.
ConnectsBelow(s) ==
  /\ slife[s] = "alive" /\ ~Connected(s) /\ Hint > 1
  /\ sdata' = [sdata EXCEPT ![s].incarnation = 1] /\ UNCHANGED sstate /\ Rest

\* The far end of an open link is closed without a reason.
EndCloses(s, w) ==
  /\ IsOpen(s, w) /\ gone' = [gone EXCEPT ![s][w] = TRUE]
  /\ UNCHANGED <<sender, receiver, messages, answers>>

\* A link gets another number, and no Hello.
LinkRenumbered(s, w) ==
  /\ IsOpen(s, w) /\ Entries(s, w).link < MaxLink
  /\ sdata' = [sdata EXCEPT ![s].members[w].link = @ + 1] /\ UNCHANGED sstate /\ Rest

\* A link is forgotten, and its worker owes.
LinkForgotten(s, w) ==
  /\ IsOpen(s, w) /\ Owes(s, w)
  /\ sdata' = [sdata EXCEPT ![s].members[w].link_state = "LOST"] /\ UNCHANGED sstate /\ Rest

\* A sender that is not born writes.
UnbornWrites(s, w) ==
  /\ slife[s] = "unborn" /\ messages' = messages \cup {Message(s, w, 1, 0, 0)}
  /\ UNCHANGED <<sender, receiver, answers, gone>>

Planted ==
  \/ Plant = "UnknownOutcome" /\ \E s \in Senders, w \in Workers : UnknownOutcome(s, w)
  \/ Plant = "OwesUnasked" /\ \E s \in Senders, w \in Workers : OwesUnasked(s, w)
  \/ Plant = "SentToTheClosed" /\ \E s \in Senders, w \in Workers : SentToTheClosed(s, w)
  \/ Plant = "LeavesTheRows" /\ \E w \in Workers : LeavesTheRows(w)
  \/ Plant = "Overtakes" /\ Overtakes
  \/ Plant = "SwapFirst" /\ \E w \in Workers : SwapFirst(w)
  \/ Plant = "SendAgain" /\ \E s \in Senders : SendAgain(s)
  \/ Plant = "Miscounts" /\ \E s \in Senders : Miscounts(s)
  \/ Plant = "FenceRises" /\ \E w \in Workers : FenceRises(w)
  \/ Plant = "MessageVanishes" /\ MessageVanishes
  \/ Plant = "AnswerVanishes" /\ AnswerVanishes
  \/ Plant = "AnswersVanish" /\ AnswersVanish
  \/ Plant = "AnswersTheClosed" /\ \E s \in Senders, w \in Workers : AnswersTheClosed(s, w)
  \/ Plant = "AckInvented" /\ \E s \in Senders, w \in Workers : AckInvented(s, w)
  \/ Plant = "ConnectsBelow" /\ \E s \in Senders : ConnectsBelow(s)
  \/ Plant = "DropAnswer" /\ \E w \in Workers : DropAnswer(w)
  \/ Plant = "EndCloses" /\ \E s \in Senders, w \in Workers : EndCloses(s, w)
  \/ Plant = "LinkRenumbered" /\ \E s \in Senders, w \in Workers : LinkRenumbered(s, w)
  \/ Plant = "LinkForgotten" /\ \E s \in Senders, w \in Workers : LinkForgotten(s, w)
  \/ Plant = "UnbornWrites" /\ \E s \in Senders, w \in Workers : UnbornWrites(s, w)

PlantSpec == Init /\ [][Next \/ Planted]_vars
PlantByTheWorld == PlantSpec /\ FairWorld
=============================================================================
