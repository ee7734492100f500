------------------------------- MODULE Pipe --------------------------------
(***************************************************************************)
(* Links over sockets: pipe/link.py, pipe/connection.py, pipe/framing.py.  *)
(*                                                                         *)
(* A frame is written in pieces, as the socket has room.  The model has    *)
(* two: a head, which says what the message is, and a body, which holds    *)
(* the weights.  The kernel keeps pieces in order.  When an end closes,    *)
(* the pieces that it wrote can still be read.  Then the reader reaches    *)
(* the end of the stream, perhaps in the middle of a frame.                *)
(*                                                                         *)
(* Abstracted: a frame has two pieces, and a socket has room for Room      *)
(* pieces; a connection carries one model and no user messages;            *)
(* descriptors and slots are in Slots.tla.  If a worker's end closes, the  *)
(* sender may learn only later whether a piece was written before.         *)
(***************************************************************************)
EXTENDS Ends

CONSTANT Room   \* pieces in a socket's buffer, in each direction

VARIABLES
  down, up,          \* [Ends -> pieces in the kernel's buffer], oldest first
  begun,             \* messages whose head is written, and whose body is not
  downHeld, upHeld   \* [Ends -> the pieces of an incomplete frame that its reader has]

wires == <<down, up, begun, downHeld, upHeld>>
vars == <<machines, wires>>

AllRules == {
  "UnfinishedFirst",   \* an unfinished frame is finished before a new one begins
  "WholeFrames",       \* an incomplete frame at the end of the stream is dropped
  "DrainedFirst"       \* a loss is reported after all that was read before it
}
ASSUME Careless \subseteq AllRules

Piece(m, part) == [m |-> m, part |-> part]
Empty == [l \in Ends |-> <<>>]
Cleared(row, ends) == [l \in Ends |-> IF l \in ends THEN <<>> ELSE row[l]]

\* A frame as its reader assembles it: the message from its head, the weights from its body.
MessageOf(l, head, body) == Message(l, head.v, body.p)
AnswerOf(l, head, body) ==
  [s |-> l[1], w |-> l[2], k |-> l[3], inc |-> head.inc, kind |-> head.kind, fence |-> head.fence,
   v |-> body.v, p |-> body.p]

-----------------------------------------------------------------------------
(* Writing and reading *)

\* What is written next: the unfinished frame, or else the first that waits.
Next1(box) ==
  LET unfinished == box \cap begun IN
  IF unfinished # {} /\ Follows("UnfinishedFirst") THEN unfinished
  ELSE unfinished \cup (IF box \ begun = {} THEN {} ELSE {First(box \ begun)})

WriteDown(s, w, k) ==
  LET l == <<s, w, k>> IN
  \E m \in Next1(On(outbox, l)) :
    /\ Open(l) /\ Len(down[l]) < Room
    /\ down' = [down EXCEPT ![l] = Append(@, Piece(m, IF m \in begun THEN 2 ELSE 1))]
    /\ begun' = IF m \in begun THEN begun \ {m} ELSE begun \cup {m}
    /\ outbox' = IF m \in begun THEN outbox \ {m} ELSE outbox
    /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, inbox, said, heard, up, downHeld, upHeld>>

WriteUp(s, w, k) ==
  LET l == <<s, w, k>> IN
  \E m \in Next1(On(said, l)) :
    /\ Open(l) /\ Len(up[l]) < Room
    /\ up' = [up EXCEPT ![l] = Append(@, Piece(m, IF m \in begun THEN 2 ELSE 1))]
    /\ begun' = IF m \in begun THEN begun \ {m} ELSE begun \cup {m}
    /\ said' = IF m \in begun THEN said \ {m} ELSE said
    /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, heard, down, downHeld, upHeld>>

ReadDown(s, w, k) ==
  LET l == <<s, w, k>> IN
  /\ down[l] # <<>>
  /\ down' = [down EXCEPT ![l] = Tail(@)]
  /\ IF downHeld[l] = <<>>
     THEN /\ downHeld' = [downHeld EXCEPT ![l] = <<Head(down[l])>>]
          /\ UNCHANGED inbox
     ELSE /\ downHeld' = [downHeld EXCEPT ![l] = <<>>]
          /\ inbox' = inbox \cup {MessageOf(l, downHeld[l][1].m, Head(down[l]).m)}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, said, heard, up, begun, upHeld>>

ReadUp(s, w, k) ==
  LET l == <<s, w, k>> IN
  /\ Open(l) /\ up[l] # <<>>
  /\ up' = [up EXCEPT ![l] = Tail(@)]
  /\ IF upHeld[l] = <<>>
     THEN /\ upHeld' = [upHeld EXCEPT ![l] = <<Head(up[l])>>]
          /\ UNCHANGED heard
     ELSE /\ upHeld' = [upHeld EXCEPT ![l] = <<>>]
          /\ heard' = heard \cup {AnswerOf(l, upHeld[l][1].m, Head(up[l]).m)}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, said, down, begun, downHeld>>

\* All that was written has been read: the sender reaches the end of the stream. What was not written never will be.
EndOfStream(s, w) ==
  LET l == Current(s, w) IN
  /\ Open(l) /\ gone[s][w] /\ up[l] = <<>>
  /\ On(said, l) # {} \/ upHeld[l] # <<>>
  /\ said' = Off(said, {l})
  /\ begun' = begun \ On(said, l)
  /\ upHeld' = [upHeld EXCEPT ![l] = <<>>]
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, heard, down, up, downHeld>>

\* A removed rule: at the end of the stream a head without its body counts as a whole frame, with whatever its memory
\* held.
DeliverTorn(s, w, k) ==
  LET l == <<s, w, k>> IN
  /\ ~Follows("WholeFrames")
  /\ ~Open(l) /\ down[l] = <<>> /\ downHeld[l] # <<>>
  /\ inbox' = inbox \cup {Message(l, downHeld[l][1].m.v, 0)}
  /\ downHeld' = [downHeld EXCEPT ![l] = <<>>]
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, said, heard, down, up, begun, upHeld>>

-----------------------------------------------------------------------------
(* The machines' steps over these links *)

\* The worker's ends of these links close: messages in transit to them are lost.
Shut(ends) ==
  /\ outbox' = Off(outbox, ends)
  /\ begun' = begun \ (outbox \ Off(outbox, ends))
  /\ down' = Cleared(down, ends)
  /\ downHeld' = Cleared(downHeld, ends)
  /\ UNCHANGED <<up, upHeld>>

Call(s) == Calling(s) /\ UNCHANGED wires
Hear(s, w) == Hearing(s, w) /\ UNCHANGED wires
GiveUp(s, w) == GivingUp(s, w) /\ UNCHANGED wires

Notice(s, w) ==
  LET l == Current(s, w) IN
  /\ Noticing(s, w)
  /\ (up[l] = <<>> /\ upHeld[l] = <<>> /\ On(said, l) = {}) \/ ~Follows("DrainedFirst")
  /\ UNCHANGED wires

EndSender(s) ==
  /\ Ending(s)
  /\ up' = Cleared(up, Of(s)) /\ upHeld' = Cleared(upHeld, Of(s))
  /\ begun' = begun \ (said \ Off(said, Of(s)))
  /\ UNCHANGED <<down, downHeld>>

Read(w, s, k) == Reading(w, s, k) /\ UNCHANGED wires
Decide(w) == Deciding(w) /\ UNCHANGED wires
Greet(w, s, k) == Greeting(w, s, k) /\ Shut(GreetingCloses(w, s, k))
Misfit(w, s, k) == Misfitting(w, s, k) /\ Shut({<<s, w, k>>})
Drop(w, s, k) == Dropping(w, s, k) /\ Shut({<<s, w, k>>})
Fall(w) == Falling(w) /\ Shut(To(w))

Next ==
  \/ \E s \in Senders : Call(s)
  \/ \E s \in Senders, w \in Workers : Hear(s, w)
  \/ \E s \in S!If("wrong", Senders), w \in Workers : GiveUp(s, w)
  \/ \E s \in Senders, w \in Workers : Notice(s, w)
  \/ \E s \in Senders : EndSender(s)
  \/ \E w \in Workers, s \in Senders, k \in Links : Read(w, s, k)
  \/ \E w \in Workers : Decide(w)
  \/ \E w \in Workers, s \in Senders, k \in Links : Greet(w, s, k)
  \/ \E w \in S!If("misfit", Workers), s \in Senders, k \in Links : Misfit(w, s, k)
  \/ \E w \in Workers, s \in Senders, k \in Links : Drop(w, s, k)
  \/ \E w \in Workers : Fall(w)
  \/ \E s \in Senders, w \in Workers, k \in Links : WriteDown(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : WriteUp(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : ReadDown(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : ReadUp(s, w, k)
  \/ \E s \in Senders, w \in Workers : EndOfStream(s, w)
  \/ \E s \in Senders, w \in Workers, k \in Links : DeliverTorn(s, w, k)

Start ==
  /\ Init
  /\ down = Empty /\ up = Empty /\ begun = {} /\ downHeld = Empty /\ upHeld = Empty

Spec == Start /\ [][Next]_vars

-----------------------------------------------------------------------------
(* The protocol *)

\* A message is in flight from when its link takes it until it is read: a frame is where its body is.
Left(row, l) == {row[l][i].m : i \in {j \in 1..Len(row[l]) : row[l][j].part = 2}}
MessagesUnderWay == outbox \cup inbox \cup UNION {Left(down, l) : l \in Ends}
AnswersUnderWay == said \cup heard \cup UNION {Left(up, l) : l \in Ends}

Ack == INSTANCE AckProtocol WITH
  messages <- MessagesUnderWay, answers <- AnswersUnderWay, Features <- Features \cup {"cut"},
  Reorders <- Declared.reorders, Duplicates <- Declared.duplicates, Loses <- Declared.loses, Lingers <- TRUE,
  Without <- {}, Unfair <- {}

RefinesAckProtocol == Ack!Refined

-----------------------------------------------------------------------------
(* Canaries: situations that TLC must reach, or the proof would hold vacuously *)

\* A stream ends in the middle of an answer.
EveryAnswerEnds == [][\A s \in Senders, w \in Workers : EndOfStream(s, w) => upHeld[Current(s, w)] = <<>>]_vars

\* A message waits because there is no room.
AlwaysRoom == \A l \in Ends : Open(l) /\ Len(down[l]) = Room => On(outbox, l) = {}

\* An update written before its sender closed the link is read and applied, and its outcome is LOST.
NothingLeftBehind == [][\A w \in Workers : rdata'[w].served # rdata[w].served => Open(<<R!Link(w)[1], w, R!Link(w)[2]>>)]_vars
=============================================================================
