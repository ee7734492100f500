------------------------------- MODULE Calls -------------------------------
(***************************************************************************)
(* Links whose messages are calls and whose answers are their results:     *)
(* calls/client.py, calls/server.py, calls/server_link.py; Ray and RPC.    *)
(*                                                                         *)
(* A numbered call is made for each message.  Calls reach the worker's     *)
(* server in any order and are admitted by their numbers.  Messages of the *)
(* worker return with the oldest call that was not answered yet.  A future *)
(* may fail whatever happened to its call: it may never have run, may      *)
(* have run, or may still run.  So a failure ends the link, and means      *)
(* nothing for the update.                                                 *)
(*                                                                         *)
(* Abstracted: a transport that begins a call again does so with the same  *)
(* number; which frames a result carries is a set; weights lost from Ray's *)
(* object store, which the call client itself answers, are not in it, nor  *)
(* are plain actors (evidence: the call), nor a link's last call.          *)
(***************************************************************************)
EXTENDS Ends

CONSTANT Numbers   \* calls of one link

VARIABLES
  calls,      \* [Ends -> calls begun]: [m, at, words, future]
  turn,       \* [Ends -> the number that the server admits next]
  collected,  \* [Ends -> calls, oldest first, whose results the sender has taken]
  failed      \* links with a failed future that the sender has seen

net == <<calls, turn, collected, failed>>
vars == <<machines, net>>

AllRules == {
  "FailedMayHaveRun",  \* a call whose future failed is not made again as another call
  "FailureIsNoAnswer", \* a failure is not taken for the worker's refusal
  "NumbersOnce",       \* a call that arrives again is not admitted again
  "InTurn",            \* calls are admitted in the order in which they were made
  "OldestFirst"        \* results are taken in the order in which their calls were made
}
ASSUME Careless \subseteq AllRules

\* at: "way", "arrived" (at the worker), "answered" (its result is known), "refused" (its link is closed there)
Begun(m) == [m |-> m, at |-> "way", words |-> {}, future |-> "open"]
Moved(call, at, words) == [m |-> call.m, at |-> at, words |-> words, future |-> call.future]
Over(call, future) == [m |-> call.m, at |-> call.at, words |-> call.words, future |-> future]
Is(l, n) == n <= Len(calls[l])

-----------------------------------------------------------------------------
(* To the worker *)

Begin(s, w, k) ==
  LET l == <<s, w, k>> IN
  /\ On(outbox, l) # {} /\ Open(l) /\ Len(calls[l]) < Numbers
  /\ calls' = [calls EXCEPT ![l] = Append(@, Begun(First(On(outbox, l))))]
  /\ outbox' = outbox \ {First(On(outbox, l))}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, inbox, said, heard, turn, collected, failed>>

\* It arrives at the server, whatever its future says.
Arrive(s, w, k, n) ==
  LET l == <<s, w, k>> IN
  /\ Is(l, n) /\ calls[l][n].at = "way"
  /\ calls' = [calls EXCEPT ![l][n] = Moved(@, "arrived", {})]
  /\ UNCHANGED <<machines, turn, collected, failed>>

LetIn(s, w, k, n) ==
  LET l == <<s, w, k>> IN
  /\ Is(l, n) /\ calls[l][n].at \in {"arrived", "answered"}
  /\ n = turn[l] \/ (~Follows("InTurn") /\ n >= turn[l])
  /\ turn' = [turn EXCEPT ![l] = n + 1]
  /\ inbox' = inbox \cup {calls[l][n].m}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, said, heard, calls, collected, failed>>

\* A transport retries: a repeated call gets the answer of the first one, and is not admitted.
ComeAgain(s, w, k, n) ==
  LET l == <<s, w, k>> IN
  /\ ~Follows("NumbersOnce")
  /\ Is(l, n) /\ calls[l][n].at \in {"arrived", "answered"} /\ n < turn[l] /\ calls[l][n].m \notin inbox
  /\ inbox' = inbox \cup {calls[l][n].m}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, said, heard, net>>

-----------------------------------------------------------------------------
(* Back to the sender *)

\* A message of the worker returns with the oldest call that waits at the server.
Reply(s, w, k) ==
  LET l == <<s, w, k>>
      waiting == {n \in 1..Len(calls[l]) : calls[l][n].at = "arrived"}
      oldest == CHOOSE n \in waiting : \A i \in waiting : n <= i IN
  /\ On(said, l) # {} /\ waiting # {} /\ Open(l)
  /\ calls' = [calls EXCEPT ![l][oldest] = Moved(@, "answered", On(said, l))]
  /\ said' = Off(said, {l})
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, heard, turn, collected, failed>>

Return(s, w, k, n) ==
  LET l == <<s, w, k>> IN
  /\ Open(l) /\ Is(l, n) /\ calls[l][n].at = "answered" /\ calls[l][n].future = "open"
  /\ calls' = [calls EXCEPT ![l][n] = Over(@, "done")]
  /\ UNCHANGED <<machines, turn, collected, failed>>

\* Its worker has died or has closed the link, or, if losses may be wrong, the return path is broken.
Fail(s, w, k, n) ==
  LET l == <<s, w, k>> IN
  /\ Open(l) /\ Is(l, n) /\ calls[l][n].future = "open"
  /\ gone[s][w] \/ S!May("wrong")
  /\ calls' = [calls EXCEPT ![l][n] = Over(@, "failed")]
  /\ UNCHANGED <<machines, turn, collected, failed>>

\* Results are taken in the order of their calls, up to a pending one. Once a call has failed, none of them is
\* waited for.
Collect(s, w, n) ==
  LET l == Current(s, w) IN
  /\ Open(l) /\ Is(l, n) /\ calls[l][n].future = "done"
  /\ \/ n = collected[l] + 1
     \/ /\ n > collected[l]
        /\ \E i \in 1..Len(calls[l]) : calls[l][i].future = "failed"
        /\ \A i \in (collected[l] + 1)..(n - 1) : calls[l][i].future # "done"
     \/ n > collected[l] /\ ~Follows("OldestFirst")
  /\ collected' = [collected EXCEPT ![l] = n]
  /\ heard' = heard \cup calls[l][n].words
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, said, calls, turn, failed>>

\* Results before the failure have been taken; later ones will never arrive.
SeeFailure(s, w) ==
  LET l == Current(s, w) IN
  /\ Open(l) /\ l \notin failed
  /\ gone[s][w] \/ \E i \in 1..Len(calls[l]) : calls[l][i].future = "failed"
  /\ \A i \in (collected[l] + 1)..Len(calls[l]) : calls[l][i].future # "done"
  /\ failed' = failed \cup {l}
  /\ UNCHANGED <<machines, calls, turn, collected>>

\* The link is closed at the other end: pending results will never arrive.
NeverHome(s, w) ==
  LET l == Current(s, w) IN
  /\ Open(l) /\ gone[s][w] /\ l \in failed
  /\ On(said, l) # {} \/ \E i \in (collected[l] + 1)..Len(calls[l]) : calls[l][i].words # {}
  /\ said' = Off(said, {l})
  /\ calls' = [calls EXCEPT ![l] = [i \in 1..Len(@) |-> IF i > collected[l] THEN Moved(@[i], "refused", {}) ELSE @[i]]]
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, heard, turn, collected, failed>>

\* Rules taken out: a call that failed is thought not to have run.
BeginAgain(s, w, n) ==
  LET l == Current(s, w) IN
  /\ ~Follows("FailedMayHaveRun")
  /\ Open(l) /\ Is(l, n) /\ calls[l][n].future = "failed" /\ Len(calls[l]) < Numbers
  /\ calls' = [calls EXCEPT ![l] = Append(@, Begun(calls[l][n].m))]
  /\ UNCHANGED <<machines, turn, collected, failed>>

TakeForRefusal(s, w, n) ==
  LET l == Current(s, w) IN
  /\ ~Follows("FailureIsNoAnswer")
  /\ Open(l) /\ Is(l, n) /\ calls[l][n].future = "failed" /\ calls[l][n].m.v # 0
  /\ heard' = heard \cup {S!Word(s, w, l[3], <<sdata[s].incarnation, calls[l][n].m.v, calls[l][n].m.p>>, "REFUSED",
                                 sdata[s].incarnation)}
  /\ UNCHANGED <<sstate, sdata, slife, blocked, rstate, rdata, gone, outbox, inbox, said, net>>

-----------------------------------------------------------------------------
(* The machines' steps over it *)

\* The worker's ends of these links close: their calls are not let in any more, and fail.
Turned(row, from) ==
  [i \in 1..Len(row) |-> IF i >= from /\ row[i].words = {} THEN Moved(row[i], "refused", {}) ELSE row[i]]
Shut(ends) ==
  /\ outbox' = Off(outbox, ends)
  /\ calls' = [l \in Ends |-> IF l \in ends THEN Turned(calls[l], turn[l]) ELSE calls[l]]
  /\ turn' = [l \in Ends |-> IF l \in ends THEN Numbers + 1 ELSE turn[l]]
  /\ UNCHANGED <<collected, failed>>

Call(s) == Calling(s) /\ UNCHANGED net
Hear(s, w) == Hearing(s, w) /\ UNCHANGED net
GiveUp(s, w) == GivingUp(s, w) /\ UNCHANGED net
Notice(s, w) ==
  LET l == Current(s, w) IN
  /\ Noticing(s, w)
  /\ l \in failed /\ On(said, l) = {} /\ \A i \in (collected[l] + 1)..Len(calls[l]) : calls[l][i].words = {}
  /\ UNCHANGED net
EndSender(s) ==
  /\ Ending(s)
  /\ collected' = [l \in Ends |-> IF l[1] = s THEN Numbers ELSE collected[l]]
  /\ UNCHANGED <<calls, turn, failed>>
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
  \/ \E s \in Senders, w \in Workers, k \in Links : Begin(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links, n \in 1..Numbers : Arrive(s, w, k, n)
  \/ \E s \in Senders, w \in Workers, k \in Links, n \in 1..Numbers : LetIn(s, w, k, n)
  \/ \E s \in Senders, w \in Workers, k \in Links, n \in 1..Numbers : ComeAgain(s, w, k, n)
  \/ \E s \in Senders, w \in Workers, k \in Links : Reply(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links, n \in 1..Numbers : Return(s, w, k, n)
  \/ \E s \in Senders, w \in Workers, k \in Links, n \in 1..Numbers : Fail(s, w, k, n)
  \/ \E s \in Senders, w \in Workers, n \in 1..Numbers : Collect(s, w, n)
  \/ \E s \in Senders, w \in Workers : SeeFailure(s, w)
  \/ \E s \in Senders, w \in Workers : NeverHome(s, w)
  \/ \E s \in Senders, w \in Workers, n \in 1..Numbers : BeginAgain(s, w, n)
  \/ \E s \in Senders, w \in Workers, n \in 1..Numbers : TakeForRefusal(s, w, n)

Start ==
  /\ Init
  /\ calls = [l \in Ends |-> <<>>]
  /\ turn = [l \in Ends |-> 1]
  /\ collected = [l \in Ends |-> 0]
  /\ failed = {}

Spec == Start /\ [][Next]_vars

-----------------------------------------------------------------------------
(* The protocol *)

\* A message is under way until it is let in and read; an answer until its result is taken and read.
Coming(l) == {calls[l][n].m : n \in {i \in turn[l]..Len(calls[l]) : calls[l][i].at # "refused"}}
Returning(l) == UNION {calls[l][n].words : n \in (collected[l] + 1)..Len(calls[l])}
MessagesUnderWay == outbox \cup inbox \cup UNION {Coming(l) : l \in Ends}
AnswersUnderWay == said \cup heard \cup UNION {Returning(l) : l \in Ends}

Ack == INSTANCE AckProtocol WITH
  messages <- MessagesUnderWay, answers <- AnswersUnderWay, Features <- Features \cup {"cut"},
  Reorders <- Declared.reorders, Duplicates <- Declared.duplicates, Loses <- Declared.loses, Lingers <- TRUE,
  Without <- {}, Unfair <- {}

RefinesAckProtocol == Ack!Refined

-----------------------------------------------------------------------------
(* Canaries: situations that must be found; otherwise the proof would be vacuous *)

\* A call runs though its future has failed: its version is applied, and LOST.
FailedNeverRan == [][\A s \in Senders, w \in Workers, k \in Links, n \in 1..Numbers :
  LetIn(s, w, k, n) => calls[<<s, w, k>>][n].future # "failed"]_vars
LostMeansNot == \A s \in Senders, w \in Workers :
  ~(sdata[s].out.outcomes[w] = "LOST" /\ rdata[w].served[2] = sdata[s].out.version /\ sdata[s].out.version # 0)

\* A call arrives before one that was begun earlier.
NoneIsEarly == \A l \in Ends : \A n \in 1..Len(calls[l]) : calls[l][n].at = "arrived" => \A i \in 1..n : calls[l][i].at # "way"

\* An answer is taken behind a call that has failed.
FailureComesLast == [][\A s \in Senders, w \in Workers, n \in 1..Numbers :
  Collect(s, w, n) /\ calls[Current(s, w)][n].words # {} => n = collected[Current(s, w)] + 1]_vars
=============================================================================
