------------------------------- MODULE Store -------------------------------
(***************************************************************************)
(* Links over a store and private groups of two: transports/store.         *)
(*                                                                         *)
(* Each direction of a link is a row of numbered keys, under the link's    *)
(* own name.  A value is written once and read once; its key is removed    *)
(* when the next one is taken.  A row ends with CLOSED, by its writer, or  *)
(* with END, by its reader's own side once it knows the writer is dead.    *)
(* An update's weights do not go through the store but from buffer to      *)
(* buffer, in buckets, once the other side has read that they come.        *)
(* Without a process to watch, a pulse that is silent ends a link at once. *)
(*                                                                         *)
(* Abstracted: a letter is one value, a payload two buckets, all payloads  *)
(* are large; doors, claims and hints are not in it: a worker that starts  *)
(* again does not find links that were announced to its former life; the   *)
(* loss of the store itself is a loss of its links, wrong or not.          *)
(***************************************************************************)
EXTENDS Ends

CONSTANT Numbers   \* keys in a row

VARIABLES
  down, up,            \* [row -> [number -> value]]: letters, answers and ends as they lie in the store
  downPut, upPut,      \* [Ends -> the number that its writer writes next]
  downTaken, upTaken,  \* [Ends -> the number that its reader reads next]
  sending,             \* [Ends -> the update whose buffer the group reads], or none
  landing,             \* [Ends -> version, buckets that have come, serial in the buffer's first bucket], or none
  over                 \* links of which the sender's reader has found the end

keys == <<down, up, downPut, upPut, downTaken, upTaken>>
group == <<sending, landing>>
net == <<keys, group, over>>
vars == <<machines, net>>

AllRules == {
  "LinkInKey",       \* a row is one link's alone
  "BufferKept",      \* a buffer stays as it is until the group no longer reads it
  "WholeLanding",    \* a payload that broke off is thrown away
  "WrittenBehind"    \* a writer's keys are numbered on
}
ASSUME Careless \subseteq AllRules

Buckets == 2
None == <<>>
\* `word` of a letter says whose it is: its reader does not see it.
Value(kind, v, word) == [kind |-> kind, v |-> v, word |-> word]
Row(l) == IF Follows("LinkInKey") THEN l ELSE <<l[1], l[2], 1>>
Blank == [n \in 1..Numbers |-> None]
At(rows, l, n) == IF n > Numbers THEN None ELSE rows[Row(l)][n]

\* Read: the value's key stays until the next one is taken.
Took(rows, l, n) == IF n = 1 THEN rows ELSE [rows EXCEPT ![Row(l)][n - 1] = None]
After(l, number) == IF Follows("WrittenBehind") THEN number[l] + 1 ELSE number[l]
Forgotten(row, ends) == [l \in Ends |-> IF l \in ends THEN None ELSE row[l]]

-----------------------------------------------------------------------------
(* Letters *)

\* The writing thread: what is queued leaves in order, an update's weights before the next. Once its link is closed
\* only messages without weights still leave; a process that died writes nothing.
PutDown(s, w, k) ==
  LET l == <<s, w, k>>
      m == First(On(outbox, l)) IN
  /\ On(outbox, l) # {} /\ sending[l] = None /\ downPut[l] <= Numbers
  /\ slife[s] = "alive" /\ (Open(l) \/ m.v = 0)
  /\ down' = [down EXCEPT ![Row(l)][downPut[l]] = <<Value("LETTER", m.v, <<m>>)>>]
  /\ downPut' = [downPut EXCEPT ![l] = After(l, downPut)]
  /\ sending' = IF m.v = 0 THEN sending ELSE [sending EXCEPT ![l] = <<m>>]
  /\ outbox' = IF m.v = 0 THEN outbox \ {m} ELSE outbox
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, inbox, said, heard, up, upPut, downTaken, upTaken,
                 landing, over>>

TakeDown(s, w, k) ==
  LET l == <<s, w, k>>
      value == At(down, l, downTaken[l]) IN
  /\ Laid(l) /\ value # None /\ landing[l] = None
  /\ down' = Took(down, l, downTaken[l])
  /\ downTaken' = [downTaken EXCEPT ![l] = @ + 1]
  /\ IF value[1].v = 0 THEN inbox' = inbox \cup {Letter(l, 0, 0)} /\ UNCHANGED landing
     ELSE landing' = [landing EXCEPT ![l] = <<value[1].v, 0, 0>>] /\ UNCHANGED inbox
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, said, heard, up, downPut, upPut, upTaken,
                 sending, over>>

\* A bucket goes from buffer to buffer; with the last one the update has arrived.
Bucket(s, w, k) ==
  LET l == <<s, w, k>>
      serial == IF Follows("BufferKept") THEN sending[l][1].p ELSE sdata[s].serial
      first == IF landing[l][2] = 0 THEN serial ELSE landing[l][3] IN
  /\ Open(l) /\ sending[l] # None /\ landing[l] # None
  /\ IF landing[l][2] + 1 < Buckets
     THEN /\ landing' = [landing EXCEPT ![l] = <<@[1], @[2] + 1, first>>]
          /\ UNCHANGED <<inbox, outbox, sending>>
     ELSE /\ landing' = [landing EXCEPT ![l] = None]
          /\ inbox' = inbox \cup {Letter(l, landing[l][1], IF first = serial THEN serial ELSE 0)}
          /\ outbox' = outbox \ {sending[l][1]}
          /\ sending' = [sending EXCEPT ![l] = None]
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, said, heard, keys, over>>

\* A rule taken out: a payload that broke off counts as whole.
LandTorn(s, w, k) ==
  LET l == <<s, w, k>> IN
  /\ ~Follows("WholeLanding")
  /\ ~Open(l) /\ landing[l] # None
  /\ inbox' = inbox \cup {Letter(l, landing[l][1], 0)}
  /\ landing' = [landing EXCEPT ![l] = None]
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, said, heard, keys, sending, over>>

-----------------------------------------------------------------------------
(* Answers *)

\* Whether an answer was written before its worker's end closed is found out when the sender looks.
PutUp(s, w, k) ==
  LET l == <<s, w, k>>
      m == First(On(said, l)) IN
  /\ On(said, l) # {} /\ upPut[l] <= Numbers /\ Open(l) /\ l \notin over
  /\ At(up, l, upPut[l]) = None
  /\ up' = [up EXCEPT ![Row(l)][upPut[l]] = <<Value("ANSWER", m.v, <<m>>)>>]
  /\ upPut' = [upPut EXCEPT ![l] = After(l, upPut)]
  /\ said' = said \ {m}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, heard, down, downPut, downTaken,
                 upTaken, group, over>>

\* CLOSED, by the worker; or END, by the sender, who knows that its process is dead. Behind all that was written.
PutEnd(s, w) ==
  LET l == Current(s, w) IN
  /\ Open(l) /\ gone[s][w] /\ l \notin over
  /\ upPut[l] <= Numbers /\ At(up, l, upPut[l]) = None
  /\ up' = [up EXCEPT ![Row(l)][upPut[l]] = <<Value("END", 0, None)>>]
  /\ UNCHANGED <<machines, down, downPut, upPut, downTaken, upTaken, group, over>>

TakeUp(s, w, k) ==
  LET l == <<s, w, k>>
      value == At(up, l, upTaken[l]) IN
  /\ Open(l) /\ l \notin over /\ value # None /\ value[1].kind = "ANSWER"
  /\ up' = Took(up, l, upTaken[l])
  /\ upTaken' = [upTaken EXCEPT ![l] = @ + 1]
  /\ LET m == value[1].word[1] IN
     heard' = heard \cup {[s |-> s, w |-> w, k |-> k, inc |-> m.inc, v |-> m.v, p |-> m.p, kind |-> m.kind,
                           fence |-> m.fence]}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, said, down, downPut, upPut,
                 downTaken, group, over>>

\* The end of the row. What the worker had not written by then never comes.
TakeEnd(s, w) ==
  LET l == Current(s, w)
      value == At(up, l, upTaken[l]) IN
  /\ Open(l) /\ l \notin over /\ value # None /\ value[1].kind = "END"
  /\ over' = over \cup {l}
  /\ said' = Off(said, {l})
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, heard, keys, group>>

\* No pulse: what is still in the store is not waited for.
Silence(s, w) ==
  LET l == Current(s, w) IN
  /\ Open(l) /\ gone[s][w] /\ l \notin over
  /\ over' = over \cup {l}
  /\ said' = Off(said, {l})
  /\ up' = [up EXCEPT ![Row(l)] = [n \in 1..Numbers |-> IF n < upTaken[l] THEN @[n] ELSE None]]
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, heard, down, downPut, upPut,
                 downTaken, upTaken, group>>

-----------------------------------------------------------------------------
(* The machines' steps over it *)

\* The worker's ends of these links close: nobody reads their rows any more, and no buffer of theirs.
Shut(ends) ==
  /\ outbox' = Off(outbox, ends)
  /\ sending' = Forgotten(sending, ends)
  /\ landing' = Forgotten(landing, ends)
  /\ downTaken' = [l \in Ends |-> IF l \in ends THEN Numbers + 1 ELSE downTaken[l]]
  /\ UNCHANGED <<down, up, downPut, upPut, upTaken, over>>

Call(s) == Calling(s) /\ UNCHANGED net
Hear(s, w) == Hearing(s, w) /\ UNCHANGED net
GiveUp(s, w) == GivingUp(s, w) /\ UNCHANGED net
Notice(s, w) == Noticing(s, w) /\ Current(s, w) \in over /\ UNCHANGED net
EndSender(s) ==
  /\ Ending(s)
  /\ upTaken' = [l \in Ends |-> IF l \in Of(s) THEN Numbers + 1 ELSE upTaken[l]]
  /\ UNCHANGED <<down, up, downPut, upPut, downTaken, group, over>>
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
  \/ \E s \in Senders, w \in Workers, k \in Links : TakeDown(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : Bucket(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : LandTorn(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links : PutUp(s, w, k)
  \/ \E s \in Senders, w \in Workers : PutEnd(s, w)
  \/ \E s \in Senders, w \in Workers, k \in Links : TakeUp(s, w, k)
  \/ \E s \in Senders, w \in Workers : TakeEnd(s, w)
  \/ \E s \in Senders, w \in Workers : Silence(s, w)

Start ==
  /\ Init
  /\ down = [l \in Ends |-> Blank] /\ up = [l \in Ends |-> Blank]
  /\ downPut = [l \in Ends |-> 1] /\ upPut = [l \in Ends |-> 1]
  /\ downTaken = [l \in Ends |-> 1] /\ upTaken = [l \in Ends |-> 1]
  /\ sending = [l \in Ends |-> None] /\ landing = [l \in Ends |-> None]
  /\ over = {}

Spec == Start /\ [][Next]_vars

-----------------------------------------------------------------------------
(* The protocol *)

\* A message is under way from when it was given to its link until it is read; an update is where its weights are.
Values(rows) == {x \in {<<l, n, rows[l][n]>> : l \in Ends, n \in 1..Numbers} : x[3] # None}
Unread(rows, kind, taken) ==
  {m \in {x[3][1].word[1] : x \in {y \in Values(rows) :
     y[3][1].kind = kind /\ y[2] >= taken[End(y[3][1].word[1])]}} : kind = "ANSWER" \/ m.v = 0}
LettersUnderWay == outbox \cup inbox \cup Unread(down, "LETTER", downTaken)
AnswersUnderWay == said \cup heard \cup Unread(up, "ANSWER", upTaken)

Ack == INSTANCE AckProtocol WITH
  letters <- LettersUnderWay, answers <- AnswersUnderWay, Features <- Features \cup {"cut"},
  Reorders <- Declared.reorders, Duplicates <- Declared.duplicates, Loses <- Declared.loses, Lingers <- TRUE,
  Without <- {}, Unfair <- {}

RefinesAckProtocol == Ack!Safe

-----------------------------------------------------------------------------
(* Canaries: situations that must be found, or the proof would be true for no reason *)

\* An answer that lies in the store is not waited for, since the pulse is silent.
NoneOverlooked == [][\A s \in Senders, w \in Workers : Silence(s, w) => On(Unread(up, "ANSWER", upTaken), Current(s, w)) = {}]_vars

\* A payload breaks off between two buckets.
EveryPayloadLands == \A l \in Ends : ~Open(l) => landing[l] = None \/ landing[l][2] = 0

\* Keys of a former link lie in the store when its successor's worker reads.
NothingStays == \A l \in Ends : inbox # {} /\ Open(l) /\ l[3] = 2 => \A n \in 1..Numbers : down[<<l[1], l[2], 1>>][n] = None
=============================================================================
