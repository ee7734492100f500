------------------------------- MODULE Store -------------------------------
(***************************************************************************)
(* Links that are set up through a store: transports/store.                *)
(*                                                                         *)
(* The two ends of a link find each other in a store.  Then the link has a *)
(* connection of its own, which carries messages, answers and payloads.  A *)
(* payload follows its update in pieces that are copied from the packed    *)
(* buffer when they are written.  The kernel keeps what was written in     *)
(* order until it is read, also after the writer's death, unless the       *)
(* reader's end is closed.  Then the reader finds the end of the stream,   *)
(* perhaps in the middle of a payload.  A peer whose heartbeat stops is    *)
(* lost at once: what it wrote before is not read any more.                *)
(*                                                                         *)
(* Abstracted: a message is one value, a payload two pieces, and all       *)
(* payloads are large; a connection has room for Room values; rendezvous,  *)
(* introductions and hints are not modelled: a worker that starts again    *)
(* does not find links that were announced to its former process; the loss *)
(* of the store itself is a loss of its links, wrong or not.               *)
(***************************************************************************)
EXTENDS Ends

CONSTANT Room   \* values in a connection, in each direction

VARIABLES
  down, up,     \* [Ends -> values in the kernel's buffer], oldest first
  sending,      \* [Ends -> the update whose payload is being written, and the pieces that were], or none
  arriving,     \* [Ends -> version, pieces that have arrived, serial of the first], or none
  over          \* links of which the sender's reader has found the end

net == <<down, up, sending, arriving, over>>
vars == <<machines, net>>

AllRules == {
  "BufferKept",      \* a buffer is not packed again until its payload is written
  "WholeArrival",    \* a payload that broke off is thrown away
  "DrainedFirst"     \* the end of a stream is found behind everything that was written to it
}
ASSUME Careless \subseteq AllRules

Pieces == 2
None == <<>>
Value(kind, v, serial, m) == [kind |-> kind, v |-> v, serial |-> serial, m |-> m]
Empty == [l \in Ends |-> None]
Forgotten(row, ends) == [l \in Ends |-> IF l \in ends THEN None ELSE row[l]]

-----------------------------------------------------------------------------
(* Messages and payloads *)

\* The writing thread: what is queued leaves in order, an update's payload before the next message. Once its link is
\* closed only messages without a payload still leave; a process that died writes nothing.
PutDown(s, w, k) ==
  LET l == <<s, w, k>>
      m == First(On(outbox, l)) IN
  /\ On(outbox, l) # {} /\ sending[l] = None /\ Len(down[l]) < Room
  /\ slife[s] = "alive" /\ (Open(l) \/ m.v = 0)
  /\ down' = [down EXCEPT ![l] = Append(@, Value("MESSAGE", m.v, 0, m))]
  /\ sending' = IF m.v = 0 THEN sending ELSE [sending EXCEPT ![l] = <<m, 0>>]
  /\ outbox' = IF m.v = 0 THEN outbox \ {m} ELSE outbox
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, inbox, said, heard, up, arriving, over>>

\* A piece is copied from the buffer; with the last one the update has left.
PutPiece(s, w, k) ==
  LET l == <<s, w, k>>
      m == sending[l][1]
      last == sending[l][2] + 1 = Pieces
      serial == IF Follows("BufferKept") THEN m.p ELSE sdata[s].serial IN
  /\ Open(l) /\ slife[s] = "alive" /\ sending[l] # None /\ Len(down[l]) < Room
  /\ down' = [down EXCEPT ![l] = Append(@, Value(IF last THEN "LAST" ELSE "PIECE", m.v, serial, m))]
  /\ sending' = [sending EXCEPT ![l] = IF last THEN None ELSE <<m, @[2] + 1>>]
  /\ outbox' = IF last THEN outbox \ {m} ELSE outbox
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, inbox, said, heard, up, arriving, over>>

\* The worker's reading thread: an update has arrived with its last piece.
TakeDown(s, w, k) ==
  LET l == <<s, w, k>>
      value == Head(down[l])
      serial == IF arriving[l][2] = 0 \/ arriving[l][3] = value.serial THEN value.serial ELSE 0 IN
  /\ Laid(l) /\ down[l] # <<>>
  /\ down' = [down EXCEPT ![l] = Tail(@)]
  /\ CASE value.kind = "MESSAGE" /\ value.v = 0 ->
            inbox' = inbox \cup {Message(l, 0, 0)} /\ UNCHANGED arriving
       [] value.kind = "MESSAGE" /\ value.v # 0 ->
            arriving' = [arriving EXCEPT ![l] = <<value.v, 0, 0>>] /\ UNCHANGED inbox
       [] value.kind = "PIECE" ->
            arriving' = [arriving EXCEPT ![l] = <<@[1], @[2] + 1, serial>>] /\ UNCHANGED inbox
       [] value.kind = "LAST" ->
            arriving' = [arriving EXCEPT ![l] = None] /\ inbox' = inbox \cup {Message(l, arriving[l][1], serial)}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, said, heard, up, sending, over>>

\* A rule removed: a payload that broke off counts as whole.
ArriveTorn(s, w, k) ==
  LET l == <<s, w, k>> IN
  /\ ~Follows("WholeArrival")
  /\ ~Open(l) /\ arriving[l] # None /\ down[l] = <<>>
  /\ inbox' = inbox \cup {Message(l, arriving[l][1], 0)}
  /\ arriving' = [arriving EXCEPT ![l] = None]
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, said, heard, down, up, sending, over>>

-----------------------------------------------------------------------------
(* Answers *)

\* Whether an answer was written before its worker's end closed is found out when the sender reads.
PutUp(s, w, k) ==
  LET l == <<s, w, k>>
      m == First(On(said, l)) IN
  /\ On(said, l) # {} /\ Len(up[l]) < Room /\ Open(l) /\ l \notin over
  /\ up' = [up EXCEPT ![l] = Append(@, Value("ANSWER", m.v, 0, m))]
  /\ said' = said \ {m}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, heard, down, sending, arriving, over>>

TakeUp(s, w, k) ==
  LET l == <<s, w, k>>
      m == Head(up[l]).m IN
  /\ Open(l) /\ l \notin over /\ up[l] # <<>>
  /\ up' = [up EXCEPT ![l] = Tail(@)]
  /\ heard' = heard \cup {[s |-> s, w |-> w, k |-> k, inc |-> m.inc, v |-> m.v, p |-> m.p, kind |-> m.kind,
                           fence |-> m.fence]}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, said, down, sending, arriving, over>>

\* The end of the stream, behind everything that the worker wrote. What it had not written by then never arrives.
EndOfStream(s, w) ==
  LET l == Current(s, w) IN
  /\ Open(l) /\ gone[s][w] /\ l \notin over
  /\ up[l] = <<>> \/ ~Follows("DrainedFirst")
  /\ over' = over \cup {l}
  /\ said' = Off(said, {l})
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, heard, down, up, sending, arriving>>

\* No heartbeat: what the worker wrote is not read any more.
Silence(s, w) ==
  LET l == Current(s, w) IN
  /\ Open(l) /\ gone[s][w] /\ l \notin over
  /\ over' = over \cup {l}
  /\ said' = Off(said, {l})
  /\ up' = [up EXCEPT ![l] = <<>>]
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, heard, down, sending, arriving>>

-----------------------------------------------------------------------------
(* The machines' steps over it *)

\* The worker's ends of these links close: messages in transit to them are dropped.
Shut(ends) ==
  /\ outbox' = Off(outbox, ends)
  /\ down' = Forgotten(down, ends)
  /\ sending' = Forgotten(sending, ends)
  /\ arriving' = Forgotten(arriving, ends)
  /\ UNCHANGED <<up, over>>

Call(s) == Calling(s) /\ UNCHANGED net
Hear(s, w) == Hearing(s, w) /\ UNCHANGED net
GiveUp(s, w) == GivingUp(s, w) /\ UNCHANGED net
Notice(s, w) == Noticing(s, w) /\ Current(s, w) \in over /\ UNCHANGED net
EndSender(s) ==
  /\ Ending(s)
  /\ up' = Forgotten(up, Of(s))
  /\ UNCHANGED <<down, sending, arriving, over>>
Read(w, s, k) == Reading(w, s, k) /\ UNCHANGED net
Decide(w) == Deciding(w) /\ UNCHANGED net
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
  \/ \E s \in Senders, w \in Workers, k \in Links : PutDown(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : PutPiece(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : TakeDown(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : ArriveTorn(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : PutUp(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : TakeUp(s, w, k)
  \/ \E s \in Senders, w \in Workers : EndOfStream(s, w)
  \/ \E s \in Senders, w \in Workers : Silence(s, w)

Start ==
  /\ Init
  /\ down = Empty /\ up = Empty /\ sending = Empty /\ arriving = Empty /\ over = {}

Spec == Start /\ [][Next]_vars

-----------------------------------------------------------------------------
(* The protocol *)

\* A message is in transit from when it is given to its link until it is read; an update counts as arrived when its last
\* piece has.
Unread(row, l, kind) == {row[l][i].m : i \in {j \in 1..Len(row[l]) : row[l][j].kind = kind}}
MessagesUnderWay ==
  outbox \cup inbox \cup UNION {Unread(down, l, "LAST") \cup {m \in Unread(down, l, "MESSAGE") : m.v = 0} : l \in Ends}
AnswersUnderWay == said \cup heard \cup UNION {Unread(up, l, "ANSWER") : l \in Ends}

Ack == INSTANCE AckProtocol WITH
  messages <- MessagesUnderWay, answers <- AnswersUnderWay, Features <- Features \cup {"cut"},
  Reorders <- Declared.reorders, Duplicates <- Declared.duplicates, Loses <- Declared.loses, Lingers <- TRUE,
  Without <- {}, Unfair <- {}

RefinesAckProtocol == Ack!Refined

-----------------------------------------------------------------------------
(* Canaries: situations that must be found; otherwise the proof would be vacuous *)

\* An answer that was written is not read, since the heartbeat has stopped.
NoneOverlooked == [][\A s \in Senders, w \in Workers : Silence(s, w) => up[Current(s, w)] = <<>>]_vars

\* A payload breaks off between two pieces.
EveryPayloadArrives == \A l \in Ends : ~Open(l) /\ down[l] = <<>> => arriving[l] = None \/ arriving[l][2] = 0

\* A message waits because there is no room.
AlwaysRoom == \A l \in Ends : Open(l) /\ Len(down[l]) = Room => On(outbox, l) = {}
=============================================================================
