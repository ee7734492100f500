---------------------------- MODULE AckProtocol ----------------------------
(***************************************************************************)
(* The ack protocol: senders, receivers and the links between them.        *)
(*                                                                         *)
(* The control state of a sender or receiver moves only through the rows   *)
(* of Tables.tla.  Each action does what the shipped step does: it names   *)
(* the input (the guards), looks up the row, and changes the data.  The    *)
(* names are those of weightsync/protocol/sender.py and receiver.py.       *)
(*                                                                         *)
(* A link is <<s, w, k>>: the k-th link from sender s to worker w.  A      *)
(* payload is <<incarnation, version, serial>>; serial counts dispatches   *)
(* and no machine reads it.  It identifies the weights that were sent, so  *)
(* that the properties do not rely on what the machines report.            *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, Tables

CONSTANTS
  Senders,     \* 1..n; sender 1 exists from the start, the others are copies or successors
  Workers,     \* their receivers
  MaxVersion,  \* how many versions each sender dispatches
  MaxLink,     \* how many links a sender opens to one worker
  MaxClock,    \* clocks read 1..MaxClock, in any order
  Reorders,    \* a message may overtake another on its link
  Duplicates,  \* a message may be delivered again, until its link ends
  Loses,       \* a message may vanish while its link stays up
  Lingers,     \* messages on a link when the sender closes its end may still be read, at both ends
  Features,    \* what may happen: see AllFeatures
  Without,     \* rules removed for the revert tests; {} otherwise
  Unfair       \* fairness conjuncts removed; {} otherwise

AllFeatures == {
  "async",      \* send_async and wait_async
  "subset",     \* sends that name their targets
  "deadline",   \* a wait has a deadline
  "interrupt",  \* an exception ends the wait
  "abandon",    \* the caller gives up an update
  "close",      \* the sender is closed
  "remove",     \* a worker is removed
  "bye",        \* a receiver is closed and says goodbye
  "refuse",     \* an update does not fit
  "broken",     \* a swap fails half way
  "defer",      \* a worker forwards a version to its own workers before it answers
  "invalidate", \* the user writes other weights into a worker's model
  "fail",       \* something fails at a worker, which reports it: on its link, or because it is closed
  "misfit",     \* a handshake does not fit
  "crash",      \* a worker's process dies; until it is started again, it reads nothing
  "wrong",      \* a sender gives up a working worker
  "break",      \* a link breaks between two working ends
  "cut",        \* answers that were not read before their link was lost never arrive
  "copy",       \* copies and successors of senders
  "death",      \* a sender's process dies
  "stray"       \* an answer reaches another sender of the same worker
}

AllRules == {
  "VersionsNeverReused", "RefusalsRemembered", "LexicographicOrder", "FenceKept", "SameLink", "WaitSettled",
  "IdleLinksWatched", "UnsentAnswerEndsLink", "LiveTarget", "CloseWakesCaller", "SwapIsOneStep",
  "PendingNeverEndsItself", "NamesIncarnation", "WholeSwap", "CopyStartsEmpty", "OnlyTargets", "ClosedIsClosed",
  "JoinCatchesUp", "OneOutstanding", "RefusalIsNoAck", "FailureIsNoGoodbye", "MisfitIsRefused",
  "HandInvalidates", "OverwrittenIsForgotten", "DeferredIsForgotten", "DeferredWaits", "NewestLinkStays"
}

ASSUME Features \subseteq AllFeatures
ASSUME Without \subseteq AllRules
ASSUME \E d \in Deliveries : d.reorders = Reorders /\ d.duplicates = Duplicates /\ d.loses = Loses
ASSUME RefusalKinds = {"REFUSED", "SUPERSEDED", "STALE", "FENCED", "FAILED"}

VARIABLES
  sstate,   \* sstate[s]: control state
  sdata,    \* sdata[s]: the sender's other data
  slife,    \* slife[s]: is its process alive?
  blocked,  \* blocked[s]: is a caller waiting?
  rstate,   \* rstate[w]: control state
  rdata,    \* rdata[w]: the receiver's other data
  messages,  \* messages on their way to workers
  answers,  \* messages on their way to senders
  gone      \* gone[s][w]: the worker's end of the sender's open link is closed

vars == <<sstate, sdata, slife, blocked, rstate, rdata, messages, answers, gone>>
sender == <<sstate, sdata, slife, blocked>>
receiver == <<rstate, rdata>>

-----------------------------------------------------------------------------
(* Values *)

Max(a, b) == IF a >= b THEN a ELSE b
Rule(r) == r \notin Without
May(f) == f \in Features

Incarnations == 0..(MaxClock + Cardinality(Senders))
Payloads == Incarnations \X (0..MaxVersion) \X (0..MaxVersion)
NoPayload == <<0, 0, 0>>
NoLink == <<0, 0>>

SameKey(a, b) == a[2] = b[2] /\ (a[1] = b[1] \/ ~Rule("LexicographicOrder"))
Less(a, b) ==
  IF Rule("LexicographicOrder") THEN a[1] < b[1] \/ (a[1] = b[1] /\ a[2] < b[2]) ELSE a[2] < b[2]

LinkStates == {"NONE", "EXPECTED", "UP", "LOST", "REFUSED"}   \* NONE: not among the workers
Ended == {"LOST", "REFUSED"}   \* the link is closed; its worker remains among the workers
Outcomes == {"NONE", "PENDING", "APPLIED", "REFUSED", "LOST", "ABANDONED"}   \* NONE: no target

Entry(link, link_state, served, due, catching, fence) ==
  [link |-> link, link_state |-> link_state, served |-> served, due |-> due, catching |-> catching, fence |-> fence]

\* The data of a new, copied or unpickled sender. `out` is the outstanding update, or the last report.
NewSender == [
  incarnation |-> 0, version |-> 0, serial |-> 0, dueAll |-> 0,
  members |-> [w \in Workers |-> Entry(0, "NONE", 0, 0, 0, 0)],
  out |-> [version |-> 0, owed |-> [w \in Workers |-> 0], outcomes |-> [w \in Workers |-> "NONE"], did |-> {}]
]

\* `met` is the highest incarnation seen in this life, `live` the version of each half of the model's tensors:
\* no guard reads either.
NewReceiver == [
  link |-> NoLink, fence |-> 0, met |-> 0, decided |-> NoPayload, answer |-> "NONE", pending |-> NoPayload,
  served |-> NoPayload, live |-> <<NoPayload, NoPayload>>
]

Messages == [s : Senders, w : Workers, k : 1..MaxLink, v : 0..MaxVersion, p : 0..MaxVersion]   \* v = 0: Hello
Answers == [s : Senders, w : Workers, k : 1..MaxLink, inc : Incarnations, v : 0..MaxVersion, p : 0..(MaxVersion + 1),
            kind : {"HELLO", "ACK", "BYE"} \cup RefusalKinds, fence : Incarnations]

Message(s, w, k, v, p) == [s |-> s, w |-> w, k |-> k, v |-> v, p |-> p]
Word(s, w, k, key, kind, fence) ==
  [s |-> s, w |-> w, k |-> k, inc |-> key[1], v |-> key[2], p |-> key[3], kind |-> kind, fence |-> fence]

-----------------------------------------------------------------------------
(* Derived *)

Members(s) == {w \in Workers : sdata[s].members[w].link_state # "NONE"}
Connected(s) == sdata[s].incarnation # 0

\* The sender's end of this link is open.
Open(s, w, k) ==
  /\ slife[s] = "alive" /\ sstate[s] # Final /\ Connected(s)
  /\ sdata[s].members[w].link = k /\ sdata[s].members[w].link_state \in {"EXPECTED", "UP"}

Current(s, w, k) == Open(s, w, k) \/ (~Rule("SameLink") /\ Open(s, w, sdata[s].members[w].link))
Owes(s, w) == sdata[s].out.owed[w] # 0
Owing(s) == {w \in Workers : sdata[s].out.owed[w] # 0}
OwesOver(s, w, k) == Owes(s, w) /\ (sdata[s].out.owed[w] = k \/ ~Rule("SameLink"))

\* The highest fence reported to a closed sender, whose user passes it to the successor.
KnownFences == {sdata[t].members[w].fence : t \in {u \in Senders : sstate[u] = Final}, w \in Workers}
Hint == CHOOSE f \in KnownFences \cup {0} : \A g \in KnownFences : f >= g

\* Is it first on its link? `p` increases along an ordered link; NothingOvertakes checks this.
MessageDue(m) == Reorders \/ \A n \in messages : (n.s = m.s /\ n.w = m.w /\ n.k = m.k) => m.p <= n.p
AnswerDue(m) == Reorders \/ \A n \in answers : (n.s = m.s /\ n.w = m.w /\ n.k = m.k) => m.p <= n.p

Taken(box, m) == IF Duplicates THEN box ELSE box \ {m}
MessagesBut(w, s, k) == {m \in messages : ~(m.w = w /\ m.s = s /\ m.k = k)}

\* The messages that remain on the links when the sender closes them.
AnswersLeft(s, ws) == IF Lingers THEN answers ELSE {m \in answers : ~(m.s = s /\ m.w \in ws)}
MessagesLeft(s, ws) == IF Lingers THEN messages ELSE {m \in messages : ~(m.s = s /\ m.w \in ws)}
Posted(box, m) == IF Open(m.s, m.w, m.k) THEN box \cup {m} ELSE box

\* The worker's ends of these links close.
Gone(ends) == [s \in Senders |-> [w \in Workers |->
  gone[s][w] \/ (<<s, w, sdata[s].members[w].link>> \in ends /\ Open(s, w, sdata[s].members[w].link))]]
AllEnds(w) == {<<s, w, k>> : s \in Senders, k \in 1..MaxLink}

SenderTo(s, to) == sstate' = [sstate EXCEPT ![s] = to]
ReceiverTo(w, to) == rstate' = [rstate EXCEPT ![w] = to]

-----------------------------------------------------------------------------
(* The sender: lives *)

\* copy, deepcopy, pickle, fork, or a restart of the trainer: each makes a new machine.
Copy(s, t) ==
  /\ s # t /\ slife[s] # "unborn" /\ slife[t] = "unborn" /\ \A u \in Senders : u < t => slife[u] # "unborn"
  /\ slife' = [slife EXCEPT ![t] = "alive"]
  /\ IF Rule("CopyStartsEmpty") THEN UNCHANGED <<sstate, sdata>>
     ELSE SenderTo(t, sstate[s]) /\ sdata' = [sdata EXCEPT ![t] = sdata[s]]
  /\ UNCHANGED <<blocked, receiver, messages, answers, gone>>

\* Kill -9. Only its messages remain.
Die(s) ==
  /\ slife[s] = "alive"
  /\ slife' = [slife EXCEPT ![s] = "dead"]
  /\ SenderTo(s, Initial)
  /\ sdata' = [sdata EXCEPT ![s].dueAll = 0, ![s].members = NewSender.members, ![s].out = NewSender.out]
  /\ blocked' = [blocked EXCEPT ![s] = FALSE]
  /\ answers' = {m \in answers : m.s # s}
  /\ gone' = [gone EXCEPT ![s] = [w \in Workers |-> FALSE]]
  /\ messages' = MessagesLeft(s, Workers)
  /\ UNCHANGED receiver

(* The sender: calls *)

Connect(s, clock) ==
  LET incarnation == Max(clock, Hint + 1) IN
  /\ slife[s] = "alive" /\ SenderMay(sstate[s], "CONNECT") /\ Members(s) # {}
  /\ \A t \in Senders : sdata[t].incarnation # incarnation   \* random bits
  /\ SenderTo(s, SenderNext(sstate[s], "CONNECT"))
  /\ sdata' = [sdata EXCEPT ![s].incarnation = incarnation]
  /\ messages' = messages \cup {Message(s, w, sdata[s].members[w].link, 0, 0) : w \in {x \in Members(s) : rstate[x] # Final}}
  /\ gone' = [gone EXCEPT ![s] = [w \in Workers |-> w \in Members(s) /\ rstate[w] = Final]]
  /\ UNCHANGED <<slife, blocked, receiver, answers>>

\* A link that is still open is lost first, by GiveUp.
Join(s, w) ==
  LET entry == sdata[s].members[w]
      due == Max(sdata[s].dueAll, entry.due)
      serial == IF due = sdata[s].version THEN sdata[s].serial ELSE due
      greeting == {Message(s, w, entry.link + 1, 0, 0)}
      update == IF due # 0 /\ Rule("JoinCatchesUp") THEN {Message(s, w, entry.link + 1, due, serial)} ELSE {} IN
  /\ slife[s] = "alive" /\ SenderMay(sstate[s], "JOIN")
  /\ entry.link_state \in {"NONE"} \cup Ended /\ entry.link < MaxLink
  /\ SenderTo(s, SenderNext(sstate[s], "JOIN"))
  /\ sdata' = [sdata EXCEPT ![s].members[w] = Entry(entry.link + 1, "EXPECTED", 0, due, due, 0)]
  /\ messages' = IF Connected(s) /\ rstate[w] # Final THEN messages \cup greeting \cup update ELSE messages
  /\ gone' = [gone EXCEPT ![s][w] = Connected(s) /\ rstate[w] = Final]
  /\ UNCHANGED <<slife, blocked, receiver, answers>>

\* A link that is still open is lost first, by GiveUp.
Remove(s, w) ==
  LET entry == sdata[s].members[w] IN
  /\ slife[s] = "alive" /\ SenderMay(sstate[s], "REMOVE")
  /\ entry.link_state \in Ended \/ (entry.link_state = "EXPECTED" /\ ~Connected(s))
  /\ SenderTo(s, SenderNext(sstate[s], "REMOVE"))
  /\ sdata' = [sdata EXCEPT ![s].members[w] = Entry(entry.link, "NONE", 0, 0, 0, 0)]
  /\ UNCHANGED <<slife, blocked, receiver, messages, answers, gone>>

\* Dispatch the next version to the targets. A message on a link whose other end is closed is lost.
Dispatch(s, targets, all, input) ==
  LET data == sdata[s]
      live == {w \in targets : data.members[w].link_state \notin Ended}
      reached == IF Rule("OnlyTargets") THEN live ELSE {w \in Members(s) : data.members[w].link_state \notin Ended}
      version == data.version + 1 IN
  /\ slife[s] = "alive" /\ SenderMay(sstate[s], input)
  /\ targets # {} /\ targets \subseteq Members(s)
  /\ live # {} \/ ~Rule("LiveTarget")
  /\ data.serial < MaxVersion
  /\ SenderTo(s, SenderNext(sstate[s], input))
  /\ sdata' = [sdata EXCEPT
       ![s].version = version,
       ![s].serial = data.serial + 1,
       ![s].dueAll = IF all THEN version ELSE data.dueAll,
       ![s].members = [w \in Workers |->
          IF w \in targets
          THEN Entry(data.members[w].link, data.members[w].link_state, data.members[w].served, version,
                     data.members[w].catching, data.members[w].fence)
          ELSE data.members[w]],
       ![s].out = [version |-> version,
                   owed |-> [w \in Workers |-> IF w \in live THEN data.members[w].link ELSE 0],
                   outcomes |-> [w \in Workers |-> IF w \in live THEN "PENDING"
                                                   ELSE IF w \in targets THEN data.members[w].link_state ELSE "NONE"],
                   did |-> {}]]
  /\ messages' = messages \cup
       {Message(s, w, data.members[w].link, version, data.serial + 1) : w \in {x \in reached : ~gone[s][x]}}
  /\ blocked' = [blocked EXCEPT ![s] = input = "SEND"]
  /\ UNCHANGED <<slife, receiver, answers, gone>>

SendAll(s) == /\ TRUE
              /\ Dispatch(s, Members(s), TRUE, "SEND")

SendTo(s, targets) == /\ TRUE
                      /\ Dispatch(s, targets, FALSE, "SEND")

SendAsyncAll(s) == /\ TRUE
                   /\ Dispatch(s, Members(s), TRUE, "SEND_ASYNC")

SendAsyncTo(s, targets) == /\ TRUE
                           /\ Dispatch(s, targets, FALSE, "SEND_ASYNC")

Wait(s) ==
  LET input == IF Owing(s) = {} /\ Rule("WaitSettled") THEN "WAIT_SETTLED" ELSE "WAIT" IN
  /\ slife[s] = "alive" /\ SenderMay(sstate[s], input)
  /\ SenderTo(s, SenderNext(sstate[s], input))
  /\ blocked' = [blocked EXCEPT ![s] = input = "WAIT"]
  /\ sdata' = IF input = "WAIT" THEN sdata ELSE [sdata EXCEPT ![s].out.did = {}]
  /\ UNCHANGED <<slife, receiver, messages, answers, gone>>

Deadline(s) ==
  /\ slife[s] = "alive" /\ SenderMay(sstate[s], "DEADLINE")
  /\ SenderTo(s, SenderNext(sstate[s], "DEADLINE"))
  /\ blocked' = [blocked EXCEPT ![s] = FALSE]
  /\ UNCHANGED <<sdata, slife, receiver, messages, answers, gone>>

Interrupted(s) ==
  /\ slife[s] = "alive" /\ SenderMay(sstate[s], "INTERRUPTED")
  /\ SenderTo(s, SenderNext(sstate[s], "INTERRUPTED"))
  /\ blocked' = [blocked EXCEPT ![s] = FALSE]
  /\ UNCHANGED <<sdata, slife, receiver, messages, answers, gone>>

GivenUp(s) == [w \in Workers |-> IF w \in Owing(s) THEN "ABANDONED" ELSE sdata[s].out.outcomes[w]]
Nobody == [w \in Workers |-> 0]

Abandon(s) ==
  /\ slife[s] = "alive" /\ SenderMay(sstate[s], "ABANDON")
  /\ SenderTo(s, SenderNext(sstate[s], "ABANDON"))
  /\ sdata' = [sdata EXCEPT ![s].out.owed = Nobody, ![s].out.outcomes = GivenUp(s), ![s].out.did = {},
                            ![s].version = IF Rule("VersionsNeverReused") THEN @ ELSE @ - 1]
  /\ UNCHANGED <<slife, blocked, receiver, messages, answers, gone>>

CloseSender(s) ==
  /\ slife[s] = "alive" /\ SenderMay(sstate[s], "CLOSE")
  /\ SenderTo(s, SenderNext(sstate[s], "CLOSE"))
  /\ sdata' = [sdata EXCEPT ![s].out.owed = Nobody, ![s].out.outcomes = GivenUp(s), ![s].out.did = {}]
  /\ blocked' = [blocked EXCEPT ![s] = blocked[s] /\ ~Rule("CloseWakesCaller")]
  /\ answers' = {m \in answers : m.s # s}
  /\ gone' = [gone EXCEPT ![s] = [w \in Workers |-> FALSE]]
  /\ messages' = MessagesLeft(s, Workers)
  /\ UNCHANGED <<slife, receiver>>

(* The sender: messages and losses *)

\* SETTLED if a caller waits and this worker is the last that owes an answer.
Settling(s, w, k, otherwise) ==
  IF sstate[s] = "awaiting_ack" /\ OwesOver(s, w, k) /\ Owing(s) = {w} THEN "SETTLED" ELSE otherwise

\* The sender's state after `input`; a waiting caller is woken by SETTLED.
Took(s, input) ==
  /\ SenderMay(sstate[s], input)
  /\ IF ~Rule("PendingNeverEndsItself") /\ input = "REPLY" /\ sstate[s] = "pending_async" /\ Cardinality(Owing(s)) = 1
     THEN SenderTo(s, SenderNext(sstate[s], "WAIT_SETTLED"))
     ELSE SenderTo(s, SenderNext(sstate[s], input))
  /\ blocked' = [blocked EXCEPT ![s] = blocked[s] /\ input # "SETTLED"]

\* `out` once w's answer over link k is `outcome`.
Settled(s, w, k, outcome, input) ==
  LET out == sdata[s].out IN
  IF ~OwesOver(s, w, k) THEN out
  ELSE [version |-> out.version,
        owed |-> [x \in Workers |-> IF x = w THEN 0 ELSE out.owed[x]],
        outcomes |-> [x \in Workers |-> IF x = w THEN outcome ELSE out.outcomes[x]],
        did |-> IF input = "SETTLED" THEN {} ELSE out.did]

\* The link is closed at once and no longer owes an answer. It was lost, or its worker refused the handshake.
End(s, w, k, link_state, fence, input) ==
  LET entry == sdata[s].members[w] IN
  /\ Took(s, input)
  /\ sdata' = [sdata EXCEPT ![s].members[w] = Entry(entry.link, link_state, entry.served, entry.due, 0, fence),
                            ![s].out = Settled(s, w, k, link_state, input)]
  /\ gone' = [gone EXCEPT ![s][w] = FALSE]

Lose(s, w, k, input) == End(s, w, k, "LOST", 0, input)

\* The driver notices that the other end is closed; on an ordered link, after it has read what came before.
Notice(s, w) ==
  LET k == sdata[s].members[w].link IN
  /\ Open(s, w, k) /\ gone[s][w]
  /\ Reorders \/ {m \in answers : m.s = s /\ m.w = w /\ m.k = k} = {}
  /\ Rule("IdleLinksWatched") \/ Owes(s, w)
  /\ Lose(s, w, k, Settling(s, w, k, "LOST"))
  /\ answers' = AnswersLeft(s, {w})
  /\ messages' = MessagesLeft(s, {w})
  /\ UNCHANGED <<slife, receiver>>

\* The driver gives up the link of a working worker: a wrong loss, a failed write, or a new link that replaces it.
GiveUp(s, w) ==
  LET k == sdata[s].members[w].link IN
  /\ Open(s, w, k) /\ ~gone[s][w]
  /\ Lose(s, w, k, Settling(s, w, k, "LOST"))
  /\ answers' = AnswersLeft(s, {w})
  /\ messages' = MessagesLeft(s, {w})
  /\ UNCHANGED <<slife, receiver>>

\* The input for an answer over link k.
NameAnswer(s, m) ==
  LET entry == sdata[s].members[m.w] IN
  CASE ~Current(s, m.w, m.k) \/ (m.inc # sdata[s].incarnation /\ Rule("NamesIncarnation")) -> "STALE"
    [] m.kind = "HELLO" -> IF entry.link_state = "EXPECTED" THEN "ARRIVED" ELSE "STALE"
    [] m.kind = "BYE" -> Settling(s, m.w, m.k, "LEFT")
    [] m.kind \in RefusalKinds /\ m.v = 0 -> Settling(s, m.w, m.k, "LOST")
    [] OwesOver(s, m.w, m.k) /\ m.v = sdata[s].version -> Settling(s, m.w, m.k, "REPLY")
    [] m.v = entry.catching /\ m.v # 0 -> "CAUGHT_UP"
    [] OTHER -> "STALE"

\* The effect of an answer with an outcome: the link is up, and the worker no longer owes an answer.
Count(s, m, outcome, input) ==
  LET entry == sdata[s].members[m.w] IN
  sdata' = IF input = "STALE" THEN sdata ELSE [sdata EXCEPT
    ![s].members[m.w] = Entry(entry.link, "UP", IF outcome = "APPLIED" THEN m.v ELSE entry.served, entry.due,
                           IF m.v >= entry.catching THEN 0 ELSE entry.catching, entry.fence),
    ![s].out = IF input = "CAUGHT_UP" THEN @ ELSE Settled(s, m.w, m.k, outcome, input),
    ![s].version = IF Rule("VersionsNeverReused") \/ outcome # "REFUSED" \/ input # "SETTLED" THEN @ ELSE @ - 1]

AnswerHello(s, w, k) ==
  \E m \in answers :
    LET input == NameAnswer(s, m) IN
    /\ m.s = s /\ m.w = w /\ m.k = k /\ m.kind = "HELLO" /\ AnswerDue(m)
    /\ Took(s, input)
    /\ sdata' = IF input = "STALE" THEN sdata ELSE [sdata EXCEPT ![s].members[w].link_state = "UP"]
    /\ answers' = Taken(answers, m)
    /\ UNCHANGED <<slife, receiver, messages, gone>>

AnswerAck(s, w, k, v) ==
  \E m \in answers :
    LET input == NameAnswer(s, m) IN
    /\ m.s = s /\ m.w = w /\ m.k = k /\ m.v = v /\ m.kind = "ACK" /\ AnswerDue(m)
    /\ Took(s, input)
    /\ Count(s, m, "APPLIED", input)
    /\ answers' = Taken(answers, m)
    /\ UNCHANGED <<slife, receiver, messages, gone>>

AnswerRefusal(s, w, k, v, kind) ==
  \E m \in answers :
    LET input == NameAnswer(s, m) IN
    /\ v # 0 /\ m.s = s /\ m.w = w /\ m.k = k /\ m.v = v /\ m.kind = kind /\ AnswerDue(m)
    /\ Took(s, input)
    /\ Count(s, m, IF Rule("RefusalIsNoAck") THEN "REFUSED" ELSE "APPLIED", input)
    /\ answers' = Taken(answers, m)
    /\ UNCHANGED <<slife, receiver, messages, gone>>

\* The worker refused the handshake, failed, or has seen a newer sender: it accepts nothing more from
\* this sender over this link.
AnswerRejected(s, w, k, kind) ==
  \E m \in answers :
    LET input == NameAnswer(s, m) IN
    /\ m.s = s /\ m.w = w /\ m.k = k /\ m.v = 0 /\ m.kind = kind /\ AnswerDue(m)
    /\ IF input = "STALE" THEN Took(s, input) /\ UNCHANGED <<sdata, gone>>
       ELSE End(s, w, k, IF kind = "REFUSED" /\ Rule("MisfitIsRefused") THEN "REFUSED" ELSE "LOST",
                IF kind = "FENCED" THEN m.fence ELSE 0, input)
    /\ answers' = IF input = "STALE" THEN Taken(answers, m) ELSE AnswersLeft(s, {w}) \ {m}
    /\ messages' = IF input = "STALE" THEN messages ELSE MessagesLeft(s, {w})
    /\ UNCHANGED <<slife, receiver>>

\* Bye: the link is closed and no longer owes an answer, and the worker is removed. Messages that remain on a
\* closed link are never read.
AnswerBye(s, w, k) ==
  \E m \in answers :
    LET entry == sdata[s].members[w]
        input == NameAnswer(s, m) IN
    /\ m.s = s /\ m.w = w /\ m.k = k /\ m.kind = "BYE" /\ AnswerDue(m) /\ Open(s, w, k)
    /\ Took(s, input)
    /\ IF input = "STALE" THEN UNCHANGED <<sdata, gone>>
       ELSE /\ sdata' = [sdata EXCEPT ![s].members[w] = Entry(entry.link, "NONE", 0, 0, 0, 0),
                                      ![s].out = Settled(s, w, k, "LOST", input)]
            /\ gone' = [gone EXCEPT ![s][w] = FALSE]
    /\ answers' = IF input = "STALE" THEN Taken(answers, m) ELSE AnswersLeft(s, {w}) \ {m}
    /\ messages' = IF input = "STALE" THEN messages ELSE MessagesLeft(s, {w})
    /\ UNCHANGED <<slife, receiver>>

-----------------------------------------------------------------------------
(* The receiver: messages *)

Link(w) == rdata[w].link
Newest(w) == IF Less(rdata[w].decided, rdata[w].pending) THEN rdata[w].pending ELSE rdata[w].decided

NameHello(w, s, k) ==
  CASE sdata[s].incarnation < rdata[w].fence -> "REJECTED"
    [] rstate[w] = "uninitialized" -> "CONNECT"
    [] Link(w) = <<s, k>> /\ sdata[s].incarnation = rdata[w].fence -> "DUPLICATE"
    [] OTHER -> "TAKEOVER"

\* A worker's last message over the current link: goodbye, or why it accepts nothing more.
LastWord(w, kind, fence) ==
  Word(Link(w)[1], w, Link(w)[2], <<rdata[w].fence, 0, MaxVersion + 1>>,
       IF kind = "FAILED" /\ ~Rule("FailureIsNoGoodbye") THEN "BYE" ELSE kind,
       IF kind = "FAILED" /\ ~Rule("FailureIsNoGoodbye") THEN 0 ELSE fence)
Parted(w, kind, fence) == IF Link(w) = NoLink THEN answers ELSE Posted(answers, LastWord(w, kind, fence))

\* The model no longer holds the version applied last: over a new link it is applied again, and no deferred answer to it
\* is sent.
Overwritten(w) ==
  /\ rdata[w].served = NoPayload
  /\ \/ rdata[w].answer = "ACK" /\ Rule("OverwrittenIsForgotten")
     \/ rdata[w].answer = "DEFERRED" /\ Rule("DeferredIsForgotten")

\* The current link is a newer one of the same sender: its Hello was read before. Only the end of this link is noticed.
Replaced(w, s, k) == Rule("NewestLinkStays") /\ Link(w)[1] = s /\ k < Link(w)[2]

Rejection(w, s, k, kind) == Word(s, w, k, <<sdata[s].incarnation, 0, 0>>, kind, rdata[w].fence)

HelloArrived(w, s, k) ==
  LET m == Message(s, w, k, 0, 0)
      input == NameHello(w, s, k)
      incarnation == sdata[s].incarnation
      old == <<Link(w)[1], w, Link(w)[2]>> IN
  /\ m \in messages /\ ~Replaced(w, s, k) /\ ReceiverMay(rstate[w], input)
  /\ ReceiverTo(w, ReceiverNext(rstate[w], input))
  /\ CASE input = "REJECTED" ->
            /\ messages' = MessagesBut(w, s, k)
            /\ answers' = Posted(answers, Rejection(w, s, k, "FENCED"))
            /\ gone' = Gone({<<s, w, k>>})
            /\ UNCHANGED rdata
       [] input = "DUPLICATE" ->
            /\ messages' = Taken(messages, m)
            /\ UNCHANGED <<answers, gone, rdata>>
       [] OTHER ->
            /\ rdata' = [rdata EXCEPT ![w].link = <<s, k>>, ![w].fence = incarnation, ![w].met = Max(@, incarnation),
                                      ![w].decided = IF Overwritten(w) THEN NoPayload ELSE @,
                                      ![w].answer = IF Overwritten(w) THEN "NONE" ELSE @, ![w].pending = NoPayload]
            /\ messages' = Taken({n \in messages : ~(n.w = w /\ <<n.s, n.k>> = Link(w))}, m)
            /\ answers' = Posted(IF rdata[w].fence < incarnation THEN Parted(w, "FENCED", incarnation) ELSE answers,
                                  Word(s, w, k, <<incarnation, 0, 0>>, "HELLO", 0))
            /\ gone' = Gone({old})
  /\ UNCHANGED <<sender>>

\* Another layout, protocol or key. An older sender is answered FENCED, whatever else does not fit.
Misfit(w, s, k) ==
  LET m == Message(s, w, k, 0, 0)
      kind == IF sdata[s].incarnation < rdata[w].fence THEN "FENCED" ELSE "REFUSED" IN
  /\ m \in messages /\ ~Replaced(w, s, k) /\ ReceiverMay(rstate[w], "REJECTED") /\ Link(w) # <<s, k>>
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "REJECTED"))
  /\ messages' = MessagesBut(w, s, k)
  /\ answers' = Posted(answers, Rejection(w, s, k, kind))
  /\ gone' = Gone({<<s, w, k>>})
  /\ UNCHANGED <<sender, rdata>>

NameUpdate(w, key) ==
  CASE key[1] < rdata[w].fence -> "STALE"
    [] SameKey(key, rdata[w].decided) \/ SameKey(key, rdata[w].pending) -> "DUPLICATE"
    [] Less(key, Newest(w)) -> "STALE"
    [] rstate[w] = "pending_async" -> "NEWER"
    [] OTHER -> "UPDATE"

\* Nothing is read from a link before its Hello, and no update in awaiting_ack.
UpdateArrived(w, s, k, v) ==
  \E m \in messages :
    LET key == <<sdata[s].incarnation, v, m.p>>
        input == NameUpdate(w, key)
        again == input = "DUPLICATE" /\ SameKey(key, rdata[w].decided) /\ rdata[w].answer # "DEFERRED"
        \* A deferred answer leaves before a newer version takes its place: its sender may be catching up with it.
        overdue == input = "UPDATE" /\ rdata[w].answer = "DEFERRED" /\ rdata[w].decided[1] = key[1] IN
    /\ m.w = w /\ m.s = s /\ m.k = k /\ m.v = v /\ v # 0 /\ MessageDue(m)
    /\ Link(w) = <<s, k>> /\ ReceiverMay(rstate[w], input)
    /\ ReceiverTo(w, ReceiverNext(rstate[w], input))
    /\ rdata' = IF input \in {"UPDATE", "NEWER"}
                THEN [rdata EXCEPT ![w].pending = key, ![w].answer = IF overdue THEN "ACK" ELSE @] ELSE rdata
    /\ messages' = Taken(messages, m)
    /\ answers' = CASE input = "STALE" -> Posted(answers, Word(s, w, k, key, "STALE", rdata[w].fence))
                    [] input = "NEWER" -> Posted(answers, Word(s, w, k, rdata[w].pending, "SUPERSEDED", rdata[w].fence))
                    [] overdue -> Posted(answers, Word(s, w, k, rdata[w].decided, "ACK", 0))
                    [] again -> Posted(answers, Word(s, w, k, <<key[1], key[2], rdata[w].decided[3]>>,
                                                     rdata[w].answer,
                                                     IF rdata[w].answer = "ACK" THEN 0 ELSE rdata[w].fence))
                    [] OTHER -> answers
    /\ UNCHANGED <<sender, gone>>

(* The receiver: its own results *)

\* The sender of this payload, if it is outstanding; only the properties use this.
Did(w, key) == [s \in Senders |->
  IF key[1] = sdata[s].incarnation /\ key[3] = sdata[s].serial /\ sstate[s] \in {"pending_async", "awaiting_ack"}
  THEN [sdata[s] EXCEPT !.out.did = @ \cup {w}] ELSE sdata[s]]

Applied(w) ==
  LET key == rdata[w].pending IN
  /\ ReceiverMay(rstate[w], "APPLIED")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "APPLIED"))
  /\ rdata' = [rdata EXCEPT ![w].pending = NoPayload, ![w].decided = key, ![w].answer = "ACK",
                            ![w].served = key, ![w].live = <<key, key>>]
  /\ sdata' = Did(w, key)
  /\ UNCHANGED <<sstate, slife, blocked, messages, answers, gone>>

\* Applied, and forwarded to its own workers before the answer is sent.
Defer(w) ==
  LET key == rdata[w].pending IN
  /\ ReceiverMay(rstate[w], "DEFERRED")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "DEFERRED"))
  /\ rdata' = [rdata EXCEPT ![w].pending = NoPayload, ![w].decided = key, ![w].answer = "DEFERRED",
                            ![w].served = key, ![w].live = <<key, key>>]
  /\ sdata' = Did(w, key)
  /\ UNCHANGED <<sstate, slife, blocked, messages, answers, gone>>

\* It was forwarded. In awaiting_ack, Answered sends the answer; else it goes over its sender's current link, if any.
SendAck(w) ==
  LET due == Link(w) # NoLink /\ rdata[w].decided[1] = rdata[w].fence /\ rstate[w] # "awaiting_ack" IN
  /\ rdata[w].answer = "DEFERRED" /\ ReceiverMay(rstate[w], "SEND_ACK")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "SEND_ACK"))
  /\ rdata' = [rdata EXCEPT ![w].answer = "ACK"]
  /\ answers' = IF due THEN Posted(answers, Word(Link(w)[1], w, Link(w)[2], rdata[w].decided, "ACK", 0)) ELSE answers
  /\ UNCHANGED <<sender, messages, gone>>

Refused(w) ==
  LET key == rdata[w].pending IN
  /\ ReceiverMay(rstate[w], "REFUSED")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "REFUSED"))
  /\ rdata' = IF Rule("RefusalsRemembered")
              THEN [rdata EXCEPT ![w].pending = NoPayload, ![w].decided = key, ![w].answer = "REFUSED"]
              ELSE [rdata EXCEPT ![w].answer = "REFUSED"]
  /\ UNCHANGED <<sender, messages, answers, gone>>

Broken(w) ==
  /\ ReceiverMay(rstate[w], "BROKEN")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "BROKEN"))
  /\ rdata' = [rdata EXCEPT ![w].link = NoLink, ![w].pending = NoPayload, ![w].served = NoPayload,
                            ![w].live = <<NoPayload, NoPayload>>]
  /\ messages' = {m \in messages : m.w # w}
  /\ answers' = Parted(w, "FAILED", rdata[w].fence)
  /\ gone' = Gone(AllEnds(w))
  /\ UNCHANGED <<sender>>

\* The user writes other weights into the model: it no longer serves a version. The decided version stays decided until
\* the next handshake, and its answer stays correct: it was applied.
Invalidate(w) ==
  /\ ReceiverMay(rstate[w], "INVALIDATED")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "INVALIDATED"))
  /\ rdata' = [rdata EXCEPT ![w].served = IF Rule("HandInvalidates") THEN NoPayload ELSE @,
                            ![w].live = <<NoPayload, NoPayload>>]
  /\ UNCHANGED <<sender, messages, answers, gone>>

\* The answer to the decided version is sent.
OwnAnswer(w) ==
  LET key == IF Rule("RefusalsRemembered") \/ rdata[w].answer = "ACK" THEN rdata[w].decided ELSE rdata[w].pending IN
  IF rdata[w].answer = "DEFERRED" /\ ~Rule("DeferredWaits")
  THEN Word(Link(w)[1], w, Link(w)[2], rdata[w].decided, "ACK", 0)
  ELSE Word(Link(w)[1], w, Link(w)[2], key, rdata[w].answer, IF rdata[w].answer = "ACK" THEN 0 ELSE rdata[w].fence)

Answered(w) ==
  /\ ReceiverMay(rstate[w], "ANSWERED") /\ Link(w) # NoLink
  /\ rdata[w].answer # "DEFERRED" \/ ~Rule("DeferredWaits")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "ANSWERED"))
  /\ answers' = Posted(answers, OwnAnswer(w))
  /\ rdata' = [rdata EXCEPT ![w].pending = NoPayload]
  /\ UNCHANGED <<sender, messages, gone>>

\* The worker's end of a link closes: the sender's end is closed, or the link broke in between ("break"), or an answer
\* that was due could not be sent. It is LINK_DOWN for the current link, or the only one. The end of a link that was
\* replaced, or was never current, is LATE, and only loses the messages on it.
LinkDown(w, s, k) ==
  LET ours == Link(w) \in {<<s, k>>, NoLink} IN
  /\ Link(w) = <<s, k>> \/ \E m \in messages : m.w = w /\ m.s = s /\ m.k = k
  /\ ~Open(s, w, k) \/ (May("break") /\ ~gone[s][w])
  /\ IF ours
     THEN /\ ReceiverMay(rstate[w], "LINK_DOWN")
          /\ ReceiverTo(w, ReceiverNext(rstate[w], "LINK_DOWN"))
          /\ rdata' = [rdata EXCEPT ![w].link = NoLink, ![w].pending = NoPayload,
                                    ![w].fence = IF Rule("FenceKept") THEN @ ELSE 0]
     ELSE UNCHANGED <<rstate, rdata>>
  /\ messages' = MessagesBut(w, s, k)
  /\ gone' = Gone({<<s, w, k>>})
  /\ UNCHANGED <<sender, answers>>

\* Something fails at the worker's end of the current link, and it can still report this to the sender.
LinkFailed(w, s, k) ==
  /\ Link(w) = <<s, k>> /\ Open(s, w, k)
  /\ ReceiverMay(rstate[w], "LINK_DOWN")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "LINK_DOWN"))
  /\ rdata' = [rdata EXCEPT ![w].link = NoLink, ![w].pending = NoPayload]
  /\ messages' = MessagesBut(w, s, k)
  /\ answers' = Parted(w, "FAILED", rdata[w].fence)
  /\ gone' = Gone({<<s, w, k>>})
  /\ UNCHANGED <<sender>>

\* The receiver is closed; its last message over the current link is of kind `kind`.
EndReceiver(w, kind, fence) ==
  /\ ReceiverMay(rstate[w], "CLOSE")
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "CLOSE"))
  /\ rdata' = [rdata EXCEPT ![w].link = NoLink, ![w].pending = NoPayload]
  /\ messages' = {m \in messages : m.w # w}
  /\ answers' = Parted(w, kind, fence)
  /\ gone' = Gone(AllEnds(w))
  /\ UNCHANGED <<sender>>

CloseReceiver(w) == /\ TRUE
                    /\ EndReceiver(w, "BYE", 0)

\* The receiver is closed because something failed, such as the code that used it.
FailReceiver(w) == /\ TRUE
                   /\ EndReceiver(w, "FAILED", rdata[w].fence)

(* The receiver: lives *)

\* A new life has no fence and no version. It finds links opened from now on, but not its former ones.
CrashReceiver(w) ==
  /\ rdata[w] # NewReceiver
  /\ ReceiverTo(w, Initial)
  /\ rdata' = [rdata EXCEPT ![w] = NewReceiver]
  /\ messages' = {m \in messages : m.w # w}
  /\ gone' = Gone(AllEnds(w))
  /\ UNCHANGED <<sender, answers>>

-----------------------------------------------------------------------------
(* The network *)

LoseMessage(s, w, k, v) ==
  \E m \in messages :
    /\ m.s = s /\ m.w = w /\ m.k = k /\ m.v = v
    /\ messages' = messages \ {m}
    /\ UNCHANGED <<sender, receiver, answers, gone>>

LoseAnswer(s, w, k, v, kind) ==
  \E m \in answers :
    /\ m.s = s /\ m.w = w /\ m.k = k /\ m.v = v /\ m.kind = kind
    /\ answers' = answers \ {m}
    /\ UNCHANGED <<sender, receiver, messages, gone>>

\* "In order, once, or the link breaks": of one that broke, or that the sender is about to give up, any answers may be
\* lost that it had not read.
CutAnswers(s, w, k, ps) ==
  LET on == {m \in answers : m.s = s /\ m.w = w /\ m.k = k} IN
  /\ Open(s, w, k) /\ (gone[s][w] \/ May("wrong"))
  /\ ps # {} /\ ps \subseteq {m.p : m \in on}
  /\ answers' = answers \ {m \in on : m.p \in ps}
  /\ UNCHANGED <<sender, receiver, messages, gone>>

\* Two senders use one store or connection: an answer to s arrives at t, over its link of the same number.
Stray(s, t, w, k) ==
  \E m \in answers :
    /\ s # t /\ m.s = s /\ m.w = w /\ m.k = k /\ Open(t, w, k)
    /\ m.inc = sdata[s].incarnation
    /\ answers' = Taken(answers, m) \cup {[s |-> t, w |-> w, k |-> k, inc |-> m.inc, v |-> m.v, p |-> m.p,
                                            kind |-> m.kind, fence |-> m.fence]}
    /\ UNCHANGED <<sender, receiver, messages, gone>>

(* Removed rules *)

\* The swap, but not yet the input APPLIED.
SwapFirst(w) ==
  /\ rstate[w] = "pending_async" /\ rdata[w].served # rdata[w].pending
  /\ rdata' = [rdata EXCEPT ![w].served = rdata[w].pending, ![w].live = <<rdata[w].pending, rdata[w].pending>>]
  /\ UNCHANGED <<sender, rstate, messages, answers, gone>>

\* Half of the swap.
SwapHalf(w) ==
  /\ rstate[w] = "pending_async"
  /\ rdata' = [rdata EXCEPT ![w].live = <<rdata[w].pending, rdata[w].live[2]>>]
  /\ UNCHANGED <<sender, rstate, messages, answers, gone>>

\* The answer could not be sent, but the link stays.
DropAnswer(w) ==
  /\ rstate[w] = "awaiting_ack"
  /\ ReceiverTo(w, ReceiverNext(rstate[w], "ANSWERED"))
  /\ UNCHANGED <<sender, rdata, messages, answers, gone>>

\* A second send while one is outstanding is queued.
SendAgain(s) ==
  /\ slife[s] = "alive" /\ sstate[s] = "pending_async" /\ sdata[s].serial < MaxVersion
  /\ sdata' = [sdata EXCEPT ![s].version = @ + 1, ![s].serial = @ + 1, ![s].out.version = @ + 1]
  /\ UNCHANGED <<sstate, slife, blocked, receiver, messages, answers, gone>>

\* An update is applied in a receiver that is closed.
ApplyClosed(w) ==
  /\ rstate[w] = Final
  /\ rdata' = [rdata EXCEPT ![w].served = <<rdata[w].fence, MaxVersion, MaxVersion>>]
  /\ UNCHANGED <<sender, rstate, messages, answers, gone>>

-----------------------------------------------------------------------------

Init ==
  /\ sstate = [s \in Senders |-> Initial]
  /\ sdata = [s \in Senders |-> NewSender]
  /\ slife = [s \in Senders |-> IF s = 1 THEN "alive" ELSE "unborn"]
  /\ blocked = [s \in Senders |-> FALSE]
  /\ rstate = [w \in Workers |-> Initial]
  /\ rdata = [w \in Workers |-> NewReceiver]
  /\ messages = {} /\ answers = {}
  /\ gone = [s \in Senders |-> [w \in Workers |-> FALSE]]

Links == 1..MaxLink
Versions == 1..MaxVersion

\* Constant sets, so that TLC creates no instance of an impossible action.
If(feature, set) == IF May(feature) THEN set ELSE {}
IfNot(rule, set) == IF Rule(rule) THEN {} ELSE set
IfLossy(set) == IF Loses THEN set ELSE {}
Others == If("copy", Senders)
Refusals == {"SUPERSEDED", "STALE"} \cup If("refuse", {"REFUSED"})
Rejections == If("misfit", {"REFUSED"}) \cup If("copy", {"FENCED"}) \cup If("fail", {"FAILED"}) \cup If("broken", {"FAILED"})

Next ==
  \/ \E s \in Others, t \in Others : Copy(s, t)
  \/ \E s \in If("death", Senders) : Die(s)
  \/ \E s \in Senders, c \in 1..MaxClock : Connect(s, c)
  \/ \E s \in Senders, w \in Workers : Join(s, w)
  \/ \E s \in If("remove", Senders), w \in Workers : Remove(s, w)
  \/ \E s \in Senders : SendAll(s)
  \/ \E s \in If("subset", Senders), ws \in SUBSET Workers : SendTo(s, ws)
  \/ \E s \in If("async", Senders) : SendAsyncAll(s)
  \/ \E s \in If("async", If("subset", Senders)), ws \in SUBSET Workers : SendAsyncTo(s, ws)
  \/ \E s \in Senders : Wait(s)
  \/ \E s \in If("deadline", Senders) : Deadline(s)
  \/ \E s \in If("interrupt", Senders) : Interrupted(s)
  \/ \E s \in If("abandon", Senders) : Abandon(s)
  \/ \E s \in If("close", Senders) : CloseSender(s)
  \/ \E s \in Senders, w \in Workers : Notice(s, w)
  \/ \E s \in If("wrong", Senders), w \in Workers : GiveUp(s, w)
  \/ \E s \in Senders, w \in Workers, k \in Links : AnswerHello(s, w, k)
  \/ \E s \in Senders, w \in Workers, k \in Links, v \in Versions : AnswerAck(s, w, k, v)
  \/ \E s \in Senders, w \in Workers, k \in Links, v \in Versions, kind \in Refusals : AnswerRefusal(s, w, k, v, kind)
  \/ \E s \in Senders, w \in Workers, k \in Links, kind \in Rejections : AnswerRejected(s, w, k, kind)
  \/ \E s \in If("bye", Senders), w \in Workers, k \in Links : AnswerBye(s, w, k)
  \/ \E w \in Workers, s \in Senders, k \in Links : HelloArrived(w, s, k)
  \/ \E w \in If("misfit", Workers), s \in Senders, k \in Links : Misfit(w, s, k)
  \/ \E w \in Workers, s \in Senders, k \in Links, v \in Versions : UpdateArrived(w, s, k, v)
  \/ \E w \in Workers : Applied(w)
  \/ \E w \in If("defer", Workers) : Defer(w)
  \/ \E w \in If("defer", Workers) : SendAck(w)
  \/ \E w \in If("refuse", Workers) : Refused(w)
  \/ \E w \in If("broken", Workers) : Broken(w)
  \/ \E w \in If("invalidate", Workers) : Invalidate(w)
  \/ \E w \in Workers : Answered(w)
  \/ \E w \in Workers, s \in Senders, k \in Links : LinkDown(w, s, k)
  \/ \E w \in If("fail", Workers), s \in Senders, k \in Links : LinkFailed(w, s, k)
  \/ \E w \in If("bye", Workers) : CloseReceiver(w)
  \/ \E w \in If("fail", Workers) : FailReceiver(w)
  \/ \E w \in If("crash", Workers) : CrashReceiver(w)
  \/ \E s \in IfLossy(Senders), w \in Workers, k \in Links, v \in 0..MaxVersion : LoseMessage(s, w, k, v)
  \/ \E s \in IfLossy(Senders), w \in Workers, k \in Links, v \in 0..MaxVersion,
        kind \in {"HELLO", "ACK", "BYE"} \cup RefusalKinds : LoseAnswer(s, w, k, v, kind)
  \/ \E s \in If("cut", Senders), w \in Workers, k \in Links,
        ps \in SUBSET (0..(MaxVersion + 1)) : CutAnswers(s, w, k, ps)
  \/ \E s \in If("stray", Senders), t \in Senders, w \in Workers, k \in Links : Stray(s, t, w, k)
  \/ \E w \in IfNot("SwapIsOneStep", Workers) : SwapFirst(w)
  \/ \E w \in IfNot("WholeSwap", Workers) : SwapHalf(w)
  \/ \E w \in IfNot("UnsentAnswerEndsLink", Workers) : DropAnswer(w)
  \/ \E s \in IfNot("OneOutstanding", Senders) : SendAgain(s)
  \/ \E w \in IfNot("ClosedIsClosed", Workers) : ApplyClosed(w)

-----------------------------------------------------------------------------
(* What holds of every state *)

TypeOK ==
  /\ sstate \in [Senders -> States]
  /\ slife \in [Senders -> {"unborn", "alive", "dead"}]
  /\ blocked \in [Senders -> BOOLEAN]
  /\ rstate \in [Workers -> States]
  /\ messages \subseteq Messages
  /\ answers \subseteq Answers
  /\ gone \in [Senders -> [Workers -> BOOLEAN]]
  /\ \A s \in Senders :
       LET d == sdata[s] IN
       /\ d.incarnation \in Incarnations /\ d.version \in 0..MaxVersion /\ d.serial \in 0..MaxVersion
       /\ d.dueAll \in 0..d.version /\ d.out.version \in 0..MaxVersion
       /\ d.out.did \subseteq Workers
       /\ \A w \in Workers :
            /\ d.out.owed[w] \in 0..MaxLink /\ d.out.outcomes[w] \in Outcomes
            /\ d.members[w].link \in 0..MaxLink /\ d.members[w].link_state \in LinkStates
            /\ d.members[w].served \in 0..MaxVersion /\ d.members[w].due \in 0..MaxVersion
            /\ d.members[w].catching \in 0..MaxVersion /\ d.members[w].fence \in Incarnations
  /\ \A w \in Workers :
       LET d == rdata[w] IN
       /\ d.link = NoLink \/ (d.link[1] \in Senders /\ d.link[2] \in Links)
       /\ d.fence \in Incarnations /\ d.met \in Incarnations
       /\ d.decided \in Payloads /\ d.pending \in Payloads /\ d.served \in Payloads
       /\ d.live[1] \in Payloads /\ d.live[2] \in Payloads
       /\ d.answer \in {"NONE", "ACK", "DEFERRED", "REFUSED"}

\* Data and state are consistent.
Consistent ==
  /\ \A s \in Senders :
       /\ (Owing(s) # {} => sstate[s] \in {"pending_async", "awaiting_ack"})
       /\ (sstate[s] = "uninitialized" => sdata[s].out = NewSender.out)
       /\ (sstate[s] = "awaiting_ack" => Owing(s) # {} /\ blocked[s])
       /\ (blocked[s] => sstate[s] = "awaiting_ack")
       /\ \A w \in Workers :
            LET link == sdata[s].out.owed[w] IN
            /\ (link # 0) <=> sdata[s].out.outcomes[w] = "PENDING"
            /\ link # 0 => Open(s, w, link)                    \* only an open link owes an answer
            /\ gone[s][w] => Open(s, w, sdata[s].members[w].link)
  /\ \A w \in Workers :
       /\ (rstate[w] \in {"uninitialized", "closed"} <=> Link(w) = NoLink)
       /\ (rstate[w] = "pending_async" <=> rdata[w].pending # NoPayload)
       /\ (Link(w) # NoLink => rdata[w].fence = sdata[Link(w)[1]].incarnation)
       /\ (Link(w) # NoLink /\ Open(Link(w)[1], w, Link(w)[2]) => ~gone[Link(w)[1]][w])

\* A message that may be read has a row; otherwise its reader would reject a correct peer. Only a Hello of another
\* incarnation is read in awaiting_ack.
EveryMessageHasARow ==
  /\ \A m \in messages : MessageDue(m) /\ rstate[m.w] # "awaiting_ack" =>
       IF m.v = 0 THEN ReceiverMay(rstate[m.w], NameHello(m.w, m.s, m.k))
       ELSE Link(m.w) = <<m.s, m.k>> =>
              ReceiverMay(rstate[m.w], NameUpdate(m.w, <<sdata[m.s].incarnation, m.v, m.p>>))
  /\ \A m \in answers : SenderMay(sstate[m.s], NameAnswer(m.s, m))

\* The order that MessageDue and AnswerDue read off `p` is the order in which messages were sent.
NothingOvertakes ==
  [][Reorders \/
     /\ \A m \in messages' \ messages, n \in messages : (n.s = m.s /\ n.w = m.w /\ n.k = m.k) => n.p < m.p
     /\ \A m \in answers' \ answers, n \in answers : (n.s = m.s /\ n.w = m.w /\ n.k = m.k) => n.p < m.p]_vars

\* Control state moves only through the rows.
OnlyRows ==
  [][/\ \A s \in Senders : sstate'[s] # sstate[s] =>
          slife'[s] = "dead" \/ \E row \in SenderRows : row[1] = sstate[s] /\ row[3] = sstate'[s]
     /\ \A w \in Workers : rstate'[w] # rstate[w] =>
          rdata'[w] = NewReceiver \/ \E row \in ReceiverRows : row[1] = rstate[w] /\ row[3] = rstate'[w]]_vars

-----------------------------------------------------------------------------
(* The guarantees rest on this: consistent data, and messages that are neither lost nor invented *)

\* Only the served version changes at w: the user wrote other weights into its model.
Invalidated(w) ==
  May("invalidate") /\ rstate'[w] = rstate[w]
  /\ rdata'[w] = [rdata[w] EXCEPT !.served = NoPayload, !.live = <<NoPayload, NoPayload>>]
Lower(a, b) == a[1] < b[1] \/ (a[1] = b[1] /\ a[2] < b[2])
IsOutstanding(s) == sstate[s] \in {"pending_async", "awaiting_ack"}
Keeps(s) == slife[s] = "alive" /\ slife'[s] = "alive" /\ sstate'[s] # Final
Key(m) == <<m.inc, m.v, m.p>>
OverLink(m) == <<m.s, m.w, m.k>>

\* A sender's data is consistent.
SenderBooks ==
  \A s \in Senders :
    LET d == sdata[s] IN
    /\ d.version = d.serial /\ (slife[s] # "dead" => d.out.version = d.version)
    /\ sstate[s] \notin {"uninitialized", "closed"} => d.incarnation # 0
    /\ d.out.did # {} => IsOutstanding(s)
    /\ \A w \in Workers :
         LET e == d.members[w] IN
         /\ e.link_state = "NONE" => e.served = 0 /\ e.due = 0 /\ e.catching = 0 /\ e.fence = 0
         /\ e.link_state # "NONE" => e.link # 0 /\ d.dueAll <= e.due /\ e.due <= d.version
         /\ e.link_state # "LOST" => e.fence = 0
         /\ e.link_state = "EXPECTED" => e.served = 0
         /\ e.link_state \in Ended => e.catching = 0
         /\ e.fence # 0 => e.fence > d.incarnation
         /\ e.served <= e.due /\ e.catching <= e.due /\ (e.catching # 0 => e.served < e.catching)
         /\ d.out.owed[w] # 0 => d.out.owed[w] = e.link /\ e.due = d.version

\* A receiver's data is consistent.
ReceiverBooks ==
  \A w \in Workers :
    LET d == rdata[w] IN
    /\ d.fence = d.met /\ d.live = <<d.served, d.served>>
    /\ d.answer = "NONE" <=> d.decided = NoPayload
    /\ d.answer \in {"ACK", "DEFERRED"} /\ rstate[w] # Final => d.served = d.decided \/ (May("invalidate") /\ d.served = NoPayload)
    /\ d.served = d.decided \/ Lower(d.served, d.decided)
    /\ d.decided[1] <= d.fence
    /\ d.pending # NoPayload => d.pending[1] = d.fence /\ Lower(d.decided, d.pending)
    /\ rstate[w] = "awaiting_ack" => d.decided[1] = d.fence

\* An open link whose far end is not closed is its worker's current link, or its Hello has not arrived yet.
OpenLinksLeadSomewhere ==
  Loses \/ \A s \in Senders, w \in Workers :
    LET k == sdata[s].members[w].link IN
    Open(s, w, k) /\ ~gone[s][w] =>
      rdata[w].link = <<s, k>> \/ \E m \in messages : m.s = s /\ m.w = w /\ m.k = k /\ m.v = 0

\* A successor connects above every fence that was reported to a closed sender.
FencesAreHeeded ==
  [][\A s \in Senders : sdata[s].incarnation = 0 /\ sdata'[s].incarnation # 0 =>
       \A t \in Senders, w \in Workers :
         sstate[t] = Final => sdata[t].members[w].fence < sdata'[s].incarnation]_vars

\* An answer reports what happened at its worker in the step that sent it.
AnswersSayWhatHappened ==
  [][\A m \in {n \in answers' \ answers : n.inc = sdata[n.s].incarnation} :
       LET old == rdata[m.w] new == rdata'[m.w]
           decided == Key(m) = old.decided /\ new.decided = old.decided /\ m.kind = old.answer IN
       /\ Open(m.s, m.w, m.k)
       /\ m.kind \in {"HELLO", "ACK", "BYE"} => m.fence = 0
       /\ m.kind \in RefusalKinds => m.fence = new.fence
       /\ CASE m.kind = "HELLO" -> m.v = 0 /\ m.p = 0 /\ new.link = <<m.s, m.k>> /\ old.link # new.link
            [] m.kind = "ACK" ->
                 /\ old.link = <<m.s, m.k>> /\ Key(m) = old.decided /\ new.decided = old.decided
                 /\ old.answer \in {"ACK", "DEFERRED"} /\ new.answer = "ACK"
            [] m.kind = "BYE" -> m.v = 0 /\ old.link = <<m.s, m.k>> /\ CloseReceiver(m.w)
            [] m.kind = "FAILED" -> m.v = 0 /\ old.link = <<m.s, m.k>> /\ new.link = NoLink /\ m.inc = m.fence
            [] m.kind = "FENCED" ->
                 /\ m.v = 0 /\ m.inc < m.fence
                 /\ \/ m.p = 0 /\ old = new
                    \/ old.link = <<m.s, m.k>> /\ new.link \notin {old.link, NoLink}
            [] m.kind = "SUPERSEDED" -> Key(m) = old.pending /\ Lower(old.pending, new.pending)
            [] m.kind = "STALE" -> m.v # 0 /\ (Lower(Key(m), old.decided) \/ Lower(Key(m), old.pending))
            [] m.kind = "REFUSED" ->
                 IF m.v = 0 THEN m.p = 0 /\ m.inc >= m.fence ELSE decided /\ old.link = <<m.s, m.k>>]_vars

Heard(s, w, k, kind) == \E m \in answers' : m.s = s /\ m.w = w /\ m.k = k /\ m.kind = kind

\* What happens at a worker is reported over the link it concerns, while that is open; a link is closed at both ends.
NothingIsLeftUnsaid ==
  [][\A w \in Workers :
       LET old == rdata[w] new == rdata'[w] s == old.link[1] t == new.link[1]
           heard == old.link # NoLink /\ Open(s, w, old.link[2])
           Said(kind, key) == heard => \E m \in answers' : OverLink(m) = <<s, w, old.link[2]>> /\ m.kind = kind
                                                           /\ (key # NoPayload => Key(m) = key) IN
       /\ rstate[w] = "awaiting_ack" /\ rstate'[w] = "ready" /\ new.link = old.link => Said(old.answer, old.decided)
       /\ old.answer = "DEFERRED" /\ new.answer = "ACK" /\ new.decided = old.decided /\ rstate[w] # "awaiting_ack"
          /\ old.decided[1] = old.fence => Said("ACK", old.decided)
       /\ old.pending # NoPayload /\ new.pending # NoPayload /\ old.pending # new.pending =>
            Said("SUPERSEDED", old.pending)
       /\ rstate[w] # Final /\ rstate'[w] = Final => Said("BYE", NoPayload) \/ Said("FAILED", NoPayload)
       /\ old.served # NoPayload /\ new.served = NoPayload /\ new # NewReceiver /\ ~Invalidated(w) => Said("FAILED", NoPayload)
       /\ old.link # NoLink /\ new.link = NoLink /\ new # NewReceiver /\ ~May("break") =>
            Said("BYE", NoPayload) \/ Said("FAILED", NoPayload)
       /\ new.link # old.link /\ new.link # NoLink =>
            /\ new.fence = sdata[t].incarnation /\ new.fence >= old.fence /\ new.pending = NoPayload
            /\ new.served = NoPayload => new.answer \notin {"ACK", "DEFERRED"}   \* what is acked here is served
            /\ Open(t, w, new.link[2]) => Heard(t, w, new.link[2], "HELLO")
            /\ old.link # NoLink /\ old.fence < new.fence => Said("FENCED", <<old.fence, 0, MaxVersion + 1>>)
       /\ new.link # old.link /\ heard => gone'[s][w]
       /\ new.fence < old.fence => new = NewReceiver]_vars

\* If a message to a worker vanishes from a link that stays, it was the only one read, and had its proper effect.
MessagesAreRead ==
  [][Loses \/ \A m \in messages \ messages' :
       LET old == rdata[m.w] new == rdata'[m.w]
           key == <<sdata[m.s].incarnation, m.v, m.p>>
           again == <<old.decided[1], old.decided[2]>> = <<key[1], key[2]>> IN
       Open(m.s, m.w, m.k) /\ Open(m.s, m.w, m.k)' /\ ~gone[m.s][m.w] /\ ~gone'[m.s][m.w] =>
         /\ \A n \in messages \ messages' : n = m \/ OverLink(n) # OverLink(m)
         /\ Reorders \/ \A n \in messages : OverLink(n) = OverLink(m) => m.p <= n.p
         /\ m.v = 0 => new.link = <<m.s, m.k>>
         /\ m.v # 0 => old.link = <<m.s, m.k>> /\ new.link = <<m.s, m.k>>
         /\ m.v # 0 /\ Lower(old.decided, key) /\ Lower(old.pending, key) => new.pending = key
         /\ m.v # 0 /\ (Lower(key, old.decided) \/ Lower(key, old.pending)) /\ ~again =>
              /\ \E n \in answers' : OverLink(n) = OverLink(m) /\ n.kind = "STALE" /\ Key(n) = key
              /\ new = old
         /\ m.v # 0 /\ again => (old.answer = "DEFERRED" \/ Heard(m.s, m.w, m.k, old.answer)) /\ new = old]_vars

\* Answers of one link are cut, which broke or is about to be given up; no machine takes a step.
IsCut ==
  /\ May("cut") /\ UNCHANGED <<sender, receiver, messages, gone>>
  /\ \E s \in Senders, w \in Workers : LET k == sdata[s].members[w].link IN
       Open(s, w, k) /\ (gone[s][w] \/ May("wrong")) /\ \A m \in answers \ answers' : OverLink(m) = <<s, w, k>>

\* If a message to a sender vanishes from a link that stays, it was the only one read, and had its proper effect.
AnswersAreRead ==
  [][Loses \/ IsCut \/ \A m \in answers \ answers' :
       LET e == sdata[m.s].members[m.w] f == sdata'[m.s].members[m.w]
           own == m.inc = sdata[m.s].incarnation
           counts == sdata[m.s].out.owed[m.w] = m.k /\ m.v = sdata[m.s].version /\ own
           misrouted == \E n \in answers' \ answers : n.inc = m.inc /\ n.s # m.s IN
       Keeps(m.s) /\ ~misrouted =>
         /\ m.k # e.link /\ answers' = answers \ {m} => sdata'[m.s] = sdata[m.s]
         /\ m.k = e.link /\ Open(m.s, m.w, m.k)' =>
              /\ answers' = answers \ {m}
              /\ Reorders \/ \A n \in answers : OverLink(n) = OverLink(m) => m.p <= n.p
              /\ m.kind = "HELLO" /\ own => f.link_state = "UP"
              /\ counts => f.link_state = "UP"
              /\ counts /\ m.kind = "ACK" => f.served = m.v /\ sdata'[m.s].out.outcomes[m.w] = "APPLIED"
              /\ counts /\ m.kind \in RefusalKinds => sdata'[m.s].out.outcomes[m.w] = "REFUSED"
              /\ own /\ m.v # 0 /\ m.v = e.catching => f.catching = 0 /\ f.link_state = "UP"
              /\ own /\ m.v # 0 /\ m.v = e.catching /\ m.kind = "ACK" => f.served = m.v
              /\ ~own => sdata'[m.s] = sdata[m.s]
         /\ own /\ m.k = e.link /\ answers' = answers \ {m} /\ m.kind \in RefusalKinds /\ m.v = 0 => f.link_state # "UP"
         ]_vars

\* What vanishes while no machine takes a step was one ignored message, or was cut; what then arrives at another
\* sender strayed: it is no longer where it was.
NetworkKeepsItsWord ==
  [][UNCHANGED <<sender, receiver, messages, gone>> =>
       /\ Loses \/ IsCut \/ Cardinality(answers \ answers') <= 1
       /\ \A n \in answers' \ answers : n.inc # sdata[n.s].incarnation =>
            \E m \in answers : /\ sdata[m.s].incarnation = m.inc /\ Open(n.s, n.w, n.k)
                               /\ [m EXCEPT !.s = n.s] = n /\ (Duplicates \/ m \notin answers')]_vars

\* The far end of an open link is closed by its worker's close, break or crash, by another sender's takeover, by a
\* rejected handshake, or where links break.
FarEndsCloseForAReason ==
  [][\A s \in Senders, w \in Workers :
       LET k == sdata[s].members[w].link old == rdata[w] new == rdata'[w] IN
       Open(s, w, k) /\ Open(s, w, k)' /\ ~gone[s][w] /\ gone'[s][w] =>
         \/ May("break") \/ rstate'[w] = Final
         \/ old # NewReceiver /\ new = NewReceiver
         \/ old.link = <<s, k>> /\ new.link[1] \notin {s, 0}
         \/ \E m \in answers' : OverLink(m) = <<s, w, k>> /\ m.v = 0 /\ m.kind \in {"FENCED", "REFUSED", "FAILED"}]_vars

\* Each live target owes an answer to a dispatch over its link; the others are LOST; reachable ones have it in transit.
DispatchesReachTheirTargets ==
  [][\A s \in Senders : sdata'[s].serial # sdata[s].serial =>
       LET d == sdata[s] e == sdata'[s] targets == {w \in Workers : e.out.outcomes[w] # "NONE"} IN
       /\ e.serial = d.serial + 1 /\ e.out.version = e.version /\ e.incarnation = d.incarnation
       /\ e.dueAll \in {d.dueAll, e.version} /\ (e.dueAll # d.dueAll => targets = Members(s))
       /\ blocked'[s] = (sstate'[s] = "awaiting_ack")
       /\ \A w \in Workers :
            LET old == d.members[w] new == e.members[w] IN
            /\ new.link = old.link /\ new.link_state = old.link_state /\ new.served = old.served
            /\ new.catching = old.catching /\ new.fence = old.fence
            /\ new.due = IF w \in targets THEN e.version ELSE old.due
            /\ e.out.owed[w] = IF e.out.outcomes[w] = "PENDING" THEN old.link ELSE 0
            /\ e.out.outcomes[w] =
                 CASE w \notin targets -> "NONE" [] old.link_state \in Ended -> old.link_state [] OTHER -> "PENDING"
            /\ e.out.outcomes[w] = "PENDING" /\ ~gone[s][w] =>
                 \E m \in messages' : OverLink(m) = <<s, w, old.link>> /\ m.v = e.version /\ m.p = e.serial]_vars

\* A new link has a new number, and its Hello precedes the version its worker missed; or its far end is closed.
LinksBeginWhole ==
  [][\A s \in Senders, w \in Workers :
       LET e == sdata[s].members[w] f == sdata'[s].members[w]
           begins == f.link # e.link /\ Connected(s)
           opens == sdata[s].incarnation = 0 /\ sdata'[s].incarnation # 0 /\ e.link_state # "NONE"
           Sent(v) == \E m \in messages' : OverLink(m) = <<s, w, f.link>> /\ m.v = v IN
       slife'[s] = "alive" =>
       /\ f.link # e.link =>
            /\ f.link = e.link + 1 /\ f.link_state = "EXPECTED" /\ e.link_state \in {"NONE"} \cup Ended
            /\ f.due = Max(sdata[s].dueAll, e.due) /\ f.catching = f.due /\ f.served = 0 /\ f.fence = 0
       /\ sdata'[s].incarnation # sdata[s].incarnation => Members(s) # {}
       /\ begins \/ opens => IF rstate[w] = Final THEN gone'[s][w] ELSE Sent(0) /\ ~gone'[s][w]
       /\ begins /\ rstate[w] # Final /\ f.due # 0 => Sent(f.due)
       /\ f.link_state = "EXPECTED" /\ e.link_state # "EXPECTED" => f.link # e.link
       /\ f.link_state = "UP" /\ e.link_state # "UP" => e.link_state = "EXPECTED" /\ f.link = e.link
       /\ opens => \A t \in Senders : sstate[t] = Final =>
            \A x \in Workers : sdata'[s].incarnation > sdata[t].members[x].fence]_vars

\* A link that ends owes nothing, keeps the version addressed to its worker, and keeps the fence if that was the reason.
LinksEndWhole ==
  [][\A s \in Senders, w \in Workers :
       LET e == sdata[s].members[w] f == sdata'[s].members[w] out == sdata'[s].out
           ends == Open(s, w, e.link) /\ f.link_state \in {"NONE"} \cup Ended
           Comes(kind) == \E m \in answers : OverLink(m) = <<s, w, e.link>> /\ m.v = 0 /\ m.kind = kind
                                             /\ m.inc = sdata[s].incarnation IN
       Keeps(s) =>
         /\ ends => out.owed[w] = 0 /\ ~gone'[s][w]
         /\ ends /\ sdata[s].out.owed[w] # 0 => out.outcomes[w] = IF f.link_state = "REFUSED" THEN "REFUSED" ELSE "LOST"
         \* Its last message says how it ends: of these, only a goodbye removes the worker.
         /\ ends /\ f.link_state = "NONE" => Comes("BYE")
         /\ f.link_state = "REFUSED" /\ e.link_state # "REFUSED" => ends /\ Comes("REFUSED")
         /\ ends /\ ~Reorders /\ ~May("wrong") =>
              /\ Comes("BYE") => f.link_state = "NONE"
              /\ Comes("REFUSED") => f.link_state = "REFUSED"
              /\ Comes("FAILED") => f.link_state = "LOST"
         /\ ends /\ ~Lingers => ~\E m \in messages' \cup answers' : m.s = s /\ m.w = w
         /\ ends /\ f.link_state \in Ended => f.link = e.link /\ f.due = e.due /\ f.served = e.served
         /\ ends /\ ~gone[s][w] /\ ~May("wrong") =>
              \E m \in answers \ answers' : OverLink(m) = <<s, w, e.link>> /\ m.v = 0
                                             /\ m.kind \in {"BYE", "REFUSED", "FENCED", "FAILED"}
         /\ f.fence # e.fence /\ f.fence # 0 => \E m \in answers : OverLink(m) = <<s, w, e.link>> /\ m.kind = "FENCED"
                                                                   /\ m.fence = f.fence
         /\ ~ends /\ f.link = e.link /\ f.link_state = e.link_state =>
              f.fence = e.fence /\ (f.served # e.served => f.link_state = "UP")
         /\ e.link_state \in Ended => f.link_state \in {e.link_state, "EXPECTED", "NONE"}
         /\ ends /\ gone[s][w] /\ ~Reorders =>
              \A m \in answers : OverLink(m) = <<s, w, e.link>> =>
                m.kind \in {"BYE", "REFUSED", "FENCED", "FAILED"} /\ m.v = 0
         /\ gone[s][w] /\ ~gone'[s][w] => ends]_vars

\* A sender that is not born or is dead does nothing; only messages it has sent before may remain.
OnlyTheLivingAct ==
  [][\A s \in Senders : slife[s] # "alive" =>
       /\ slife'[s] # slife[s] => slife[s] = "unborn" /\ slife'[s] = "alive"
       /\ slife'[s] = slife[s] =>
            sstate'[s] = sstate[s] /\ sdata'[s] = sdata[s] /\ blocked'[s] = blocked[s] /\ gone'[s] = gone[s]
       /\ \A m \in (messages' \ messages) \cup answers' : m.s # s]_vars

\* Every call and step that a state allows is possible in it.
CallsArePossible ==
  /\ \A s \in Senders : slife[s] = "alive" =>
       /\ sstate[s] = "ready" /\ sdata[s].serial < MaxVersion
          /\ (\E w \in Workers : sdata[s].members[w].link_state \in {"EXPECTED", "UP"}) =>
            (ENABLED SendAll(s)) /\ (ENABLED SendAsyncAll(s))
       /\ sstate[s] = "pending_async" => (ENABLED Wait(s)) /\ (ENABLED Abandon(s))
       /\ sstate[s] = "awaiting_ack" => (ENABLED Deadline(s)) /\ (ENABLED Interrupted(s))
       /\ sstate[s] # Final => ENABLED CloseSender(s)
       /\ \A w \in Workers :
            LET e == sdata[s].members[w] IN
            /\ sstate[s] # Final /\ e.link_state \in {"NONE"} \cup Ended /\ e.link < MaxLink => ENABLED Join(s, w)
            /\ sstate[s] # Final /\ e.link_state \in Ended => ENABLED Remove(s, w)
            /\ Open(s, w, e.link) /\ ~gone[s][w] => ENABLED GiveUp(s, w)
            /\ gone[s][w] /\ ~(\E m \in answers : OverLink(m) = <<s, w, e.link>>) => ENABLED Notice(s, w)
  /\ \A w \in Workers :
       /\ rstate[w] = "pending_async" => (ENABLED Applied(w)) /\ (ENABLED Refused(w)) /\ (ENABLED Broken(w)) /\ (ENABLED Defer(w))
       /\ rstate[w] = "awaiting_ack" /\ rdata[w].answer # "DEFERRED" => ENABLED Answered(w)
       /\ rstate[w] # Final /\ rdata[w].answer = "DEFERRED" => ENABLED SendAck(w)
       /\ rstate[w] # Final => (ENABLED CloseReceiver(w)) /\ (ENABLED FailReceiver(w))
       /\ ENABLED Invalidate(w)
       /\ Link(w) # NoLink /\ Open(Link(w)[1], w, Link(w)[2]) => ENABLED LinkFailed(w, Link(w)[1], Link(w)[2])
       /\ rstate[w] # Final /\ rdata[w].link # NoLink /\ ~Open(rdata[w].link[1], w, rdata[w].link[2]) =>
            ENABLED LinkDown(w, rdata[w].link[1], rdata[w].link[2])
  /\ \A m \in messages : (\A n \in messages : OverLink(n) = OverLink(m) => m.p <= n.p) =>
       /\ m.v = 0 /\ rstate[m.w] \notin {Final, "awaiting_ack"} => ENABLED HelloArrived(m.w, m.s, m.k)
       /\ m.v # 0 /\ rstate[m.w] \in {"ready", "pending_async"} /\ rdata[m.w].link = <<m.s, m.k>> =>
            ENABLED UpdateArrived(m.w, m.s, m.k, m.v)
  /\ \A m \in answers : (\A n \in answers : OverLink(n) = OverLink(m) => m.p <= n.p) =>
       CASE m.kind = "HELLO" -> ENABLED AnswerHello(m.s, m.w, m.k)
         [] m.kind = "ACK" -> ENABLED AnswerAck(m.s, m.w, m.k, m.v)
         [] m.kind = "BYE" -> Open(m.s, m.w, m.k) => ENABLED AnswerBye(m.s, m.w, m.k)
         [] m.v = 0 -> ENABLED AnswerRejected(m.s, m.w, m.k, m.kind)
         [] OTHER -> ENABLED AnswerRefusal(m.s, m.w, m.k, m.v, m.kind)

-----------------------------------------------------------------------------
(* The guarantees *)

Counted(s, w) == sdata[s].out.outcomes[w] = "PENDING" /\ sdata'[s].out.outcomes[w] \in {"APPLIED", "REFUSED"}
\* An outcome comes from the answer to that version; for a refused handshake, from that refusal.
Rejected(s, w) ==
  /\ sdata[s].members[w].link_state # "REFUSED" /\ sdata'[s].members[w].link_state = "REFUSED"
  /\ sdata'[s].out.outcomes[w] = "REFUSED"
  /\ \E m \in answers : OverLink(m) = <<s, w, sdata[s].members[w].link>> /\ m.inc = sdata[s].incarnation
                         /\ m.v = 0 /\ m.kind = "REFUSED"
Acked(s, w) == sdata'[s].members[w].served # sdata[s].members[w].served /\ sdata'[s].members[w].served # 0

\* G1. An answer counts only for the (incarnation, version), and the weights, that it names.
AckNamesItsVersion ==
  [][\A s \in Senders, w \in Workers :
       /\ Counted(s, w) => Rejected(s, w) \/ \E m \in answers : m.s = s /\ m.w = w /\ m.inc = sdata[s].incarnation
                                              /\ m.v = sdata[s].out.version /\ m.p = sdata[s].serial
       /\ Acked(s, w) => \E m \in answers : m.s = s /\ m.w = w /\ m.inc = sdata[s].incarnation
                                            /\ m.v = sdata'[s].members[w].served]_vars

\* G2. APPLIED is recorded for a worker only after it has served that version, and only by an ack over its own link.
AckedMeansServed ==
  [][/\ \A s \in Senders, w \in Workers :
          /\ Counted(s, w) /\ sdata'[s].out.outcomes[w] = "APPLIED" => w \in sdata[s].out.did
          /\ Acked(s, w) => \E m \in answers : m.s = s /\ m.w = w /\ m.k = sdata[s].members[w].link /\ m.kind = "ACK"
                                               /\ m.v = sdata'[s].members[w].served
     /\ \A m \in answers' \ answers : m.kind = "ACK" =>
          \/ rdata'[m.w].served = <<m.inc, m.v, m.p>>
          \* The user wrote other weights since; ServedChangesByApplied checks that it was served.
          \/ May("invalidate") /\ rdata'[m.w].served = NoPayload /\ rdata'[m.w].answer = "ACK"
             /\ rdata[m.w].decided = <<m.inc, m.v, m.p>>
          \/ \E n \in answers : n.w = m.w /\ n.inc = m.inc /\ n.p = m.p /\ n.kind = "ACK"]_vars

\* G3. A reader finds both halves of one version. In the code, the serving lock makes the swap one step.
NoTornRead == \A w \in Workers : rdata[w].live[1] = rdata[w].live[2]

\* G4. In one life, a worker's (incarnation, version) only increases, and never starts below an incarnation it has seen.
ServingIsMonotone ==
  [][\A w \in Workers : LET old == rdata[w].served new == rdata'[w].served IN
       new # old /\ new # NoPayload => Lower(old, new) /\ new[1] >= rdata[w].met]_vars

\* G5. A sender dispatches only when nothing is outstanding.
OneOutstanding ==
  [][\A s \in Senders : sdata'[s].serial # sdata[s].serial => sstate[s] = "ready" /\ Owing(s) = {}]_vars

\* G6. The served version changes only by APPLIED, or is given up, by the user too; a refused version is not served.
RefusalKeepsServing ==
  /\ \A m \in answers : m.kind \in {"REFUSED", "SUPERSEDED"} /\ m.v # 0 /\ Link(m.w) = <<m.s, m.k>> =>
       rdata[m.w].served # <<m.inc, m.v, m.p>>
ServedChangesByApplied ==
  [][\A w \in Workers : rdata'[w].served # rdata[w].served =>
       \/ rstate[w] = "pending_async" /\ rstate'[w] = "awaiting_ack" /\ rdata'[w].served = rdata[w].pending
       \/ rdata'[w].served = NoPayload /\ (rstate'[w] = Final \/ rdata'[w] = NewReceiver)
       \/ Invalidated(w)]_vars

\* G7. A version goes to its targets, and follows the Hello of a joiner it was addressed to.
OnlyTargetsChange ==
  [][/\ \A m \in messages' \ messages : m.v # 0 =>
          LET old == sdata[m.s].members[m.w] new == sdata'[m.s].members[m.w] out == sdata'[m.s].out IN
          \/ out.version = m.v /\ out.owed[m.w] = m.k /\ out.outcomes[m.w] = "PENDING"
          \/ new.link = m.k /\ old.link # m.k /\ m.v = Max(sdata[m.s].dueAll, old.due)
     /\ \A w \in Workers : LET new == rdata'[w].pending IN
          new # rdata[w].pending /\ new # NoPayload =>
            \E m \in messages : m.w = w /\ sdata[m.s].incarnation = new[1] /\ m.v = new[2] /\ m.p = new[3]]_vars

\* G8. A copy is new, and making it changes nothing else.
CopyOwesNothing ==
  [][\A t \in Senders : slife[t] = "unborn" /\ slife'[t] # "unborn" =>
       /\ sstate'[t] = Initial /\ sdata'[t] = NewSender /\ ~blocked'[t]
       /\ \A s \in Senders \ {t} : sstate'[s] = sstate[s] /\ sdata'[s] = sdata[s] /\ blocked'[s] = blocked[s]
       /\ UNCHANGED <<receiver, messages, answers, gone>>]_vars

\* G9. Nothing leaves the state closed; in it nothing is applied, and no report changes.
ClosedIsFinal ==
  [][/\ \A s \in Senders : sstate[s] = Final /\ slife'[s] = "alive" =>
          sstate'[s] = Final /\ sdata'[s] = sdata[s]
     /\ \A w \in Workers : rstate[w] = Final /\ rdata'[w] # NewReceiver =>
          rstate'[w] = Final /\ (rdata'[w].served = rdata[w].served \/ Invalidated(w))]_vars

\* G10. A waiting caller is released: under FairClock by the clock alone, under FairWorld without one.
EverySendEnds == [](\A s \in Senders : blocked[s] => <>~blocked[s])

\* G11. An update ends only with a report, in which each target has an outcome; ABANDONED is reported only if the
\* caller gave up or closed; a wait that ends early changes no outcome.
OutcomesAreTrue ==
  [][\A s \in Senders :
       LET new == sdata'[s].out.outcomes IN
       /\ IsOutstanding(s) /\ ~IsOutstanding(s)' /\ slife'[s] # "dead" =>
            /\ (blocked[s] /\ ~blocked'[s]) \/ Wait(s) \/ Abandon(s) \/ CloseSender(s)
            /\ \A w \in Workers : new[w] # "PENDING" /\ (new[w] = "NONE" <=> sdata[s].out.outcomes[w] = "NONE")
       /\ \A w \in Workers : new[w] = "ABANDONED" /\ sdata[s].out.outcomes[w] = "PENDING" =>
            Abandon(s) \/ CloseSender(s)
       /\ sstate[s] = "awaiting_ack" /\ sstate'[s] = "pending_async" => sdata'[s] = sdata[s]]_vars

\* G12. Once no message is in transit on a link that stays, its worker has decided the newest version addressed to it.
LateJoinerCatchesUp ==
  Duplicates \/ Loses \/
  \A s \in Senders, w \in Workers :
    LET entry == sdata[s].members[w]
        k == entry.link
        due == Max(entry.due, sdata[s].dueAll) IN
    /\ due # 0 /\ Open(s, w, k) /\ ~gone[s][w] /\ Link(w) = <<s, k>> /\ rstate[w] = "ready"
    /\ ~\E m \in messages : m.s = s /\ m.w = w /\ m.k = k
    => ~Lower(rdata[w].decided, <<sdata[s].incarnation, due, 0>>)
JoinersAnswer ==
  [](\A s \in Senders, w \in Workers : sdata[s].members[w].catching # 0 => <>(sdata[s].members[w].catching = 0))

\* A link whose other end is closed is noticed, so that its worker can rejoin.
LossesAreNoticed == [](\A s \in Senders, w \in Workers : gone[s][w] => <>~gone[s][w])

-----------------------------------------------------------------------------
(* The promise *)

Phase(s) ==
  CASE slife[s] = "dead" -> "dead"
    [] sstate[s] = "pending_async" -> "outstanding"
    [] sstate[s] = "awaiting_ack" -> "waited"
    [] sstate[s] = Final -> "closed"
    [] OTHER -> "idle"

Promise == INSTANCE WeightSync WITH
  served <- [w \in Workers |-> <<rdata[w].served[1], rdata[w].served[2]>>],
  incarnation <- [s \in Senders |-> sdata[s].incarnation],
  phase <- [s \in Senders |-> Phase(s)],
  version <- [s \in Senders |-> sdata[s].version],
  outcome <- [s \in Senders |-> sdata[s].out.outcomes],
  did <- [s \in Senders |-> sdata[s].out.did]

RefinesWeightSync == Promise!Spec

-----------------------------------------------------------------------------
(* Fairness *)

Fair(conjunct, set) == IF conjunct \in Unfair THEN {} ELSE set

Reads(w) == \E s \in Senders, k \in Links : HelloArrived(w, s, k) \/ \E v \in Versions : UpdateArrived(w, s, k, v)
Hears(s, w) == \E k \in Links :
  \/ AnswerHello(s, w, k)
  \/ AnswerBye(s, w, k)
  \/ \E v \in Versions : AnswerAck(s, w, k, v)
  \/ \E kind \in Rejections : AnswerRejected(s, w, k, kind)
  \/ \E v \in Versions, kind \in Refusals : AnswerRefusal(s, w, k, v, kind)

\* (a) Time passes.
FairClock == \A s \in Fair("Deadline", Senders) : WF_vars(Deadline(s))

\* (b) Every message is delivered, every worker arrives, keeps receiving and decides, every loss is noticed.
FairWorld ==
  /\ \A w \in Fair("Reads", Workers) : WF_vars(Reads(w))
  /\ \A w \in Fair("Applied", Workers) : WF_vars(Applied(w))
  /\ \A w \in Fair("SendAck", Workers) : WF_vars(SendAck(w))
  /\ \A w \in Fair("Answered", Workers) : WF_vars(Answered(w))
  /\ \A s \in Fair("Hears", Senders), w \in Workers : WF_vars(Hears(s, w))
  /\ \A s \in Fair("Notice", Senders), w \in Workers : WF_vars(Notice(s, w))

Safe == Init /\ [][Next]_vars
\* The same, for the families. TLC looks first whether a step changes anything here: most of theirs do not.
Refined == Init /\ [][(UNCHANGED vars) \/ Next]_vars
ByTheClock == Safe /\ FairClock
ByTheWorld == Safe /\ FairWorld
=============================================================================
