-------------------------------- MODULE MCHunt --------------------------------
(***************************************************************************)
(* The module mutants are hunted with: MC, and a watch for situations.     *)
(* The hunting configurations check every property at once, and report     *)
(* each situation they reach once.  A mutant is killed if it violates a    *)
(* property, or if it never reaches a situation that the model reaches.    *)
(***************************************************************************)
EXTENDS MC, TLC

Sights == 1..240
ASSUME \A i \in Sights : TLCSet(i, FALSE)

\* Report once that a situation was reached. The line is parsed: see weightsync/model/output.py.
See(i, name, met) == TLCGet(i) \/ (met => TLCSet(i, TRUE) /\ PrintT(<<"MET", name>>))

\* The same for a situation that may be reached in each of several states: i + 1 is the register of the first.
States5 == <<"ready", "pending_async", "awaiting_ack", "uninitialized", "closed">>
SeeIn(i, name, state, met) == \A n \in 1..5 : state = States5[n] => See(i + n, <<name, state>>, met)

SituationsSeen ==
  /\ See(1, "Fenced", Fenced)
  /\ See(2, "CrashThenRecovery", CrashThenRecovery)
  /\ See(3, "Superseded", Superseded)
  /\ See(4, "ReturnAfterWrongLoss", ReturnAfterWrongLoss)
  /\ See(5, "AllLost", AllLost)
  /\ See(6, "PartialDispatch", PartialDispatch)
  /\ See(7, "MisfitSaid", MisfitSaid)
  /\ See(8, "AbandonedApplied", AbandonedApplied)
  /\ See(9, "LostApplied", LostApplied)
  /\ See(10, "WonBack", WonBack)
  /\ See(11, "StrayAnswer", StrayAnswer)
  /\ See(12, "Overtaken", Overtaken)
  /\ See(13, "Successor", Successor)
  /\ See(14, "Loss", Loss)
  /\ See(15, "StaleAck", StaleAck)
  /\ See(16, "AckAfterDeadline", AckAfterDeadline)
  /\ See(17, "Takeover", Takeover)
  /\ See(18, "SuccessAfterRefusal", SuccessAfterRefusal)
  /\ See(19, "CatchesUp", CatchesUp)
  /\ See(20, "PendingDropped", PendingDropped)
  /\ See(21, "ClosedUpon", ClosedUpon)
  /\ See(22, "SecondAnswer", SecondAnswer)
  /\ See(23, "SuccessAfterInterrupt", SuccessAfterInterrupt)
  /\ See(24, "Breaks", Breaks)
  /\ See(25, "UnsentAnswer", UnsentAnswer)
  /\ See(26, "WiderSend", WiderSend)
  /\ See(27, "ByeWhileOwing", ByeWhileOwing)
  /\ See(28, "FailureSaid", FailureSaid)
  /\ See(29, "BackAfterFailure", BackAfterFailure)

\* The rows of a sender's table, by what they do to its data.
SenderRowsSeen == \A s \in Senders :
  LET d == sdata[s] e == sdata'[s] from == sstate[s] stays == sstate'[s] = sstate[s] IN
  /\ slife'[s] = "alive" =>
       /\ See(30, "CONNECT", d.incarnation = 0 /\ e.incarnation # 0)
       /\ See(31, "SEND", e.serial # d.serial /\ sstate'[s] = "awaiting_ack")
       /\ See(32, "SEND_ASYNC", e.serial # d.serial /\ sstate'[s] = "pending_async")
       /\ See(33, "WAIT", from = "pending_async" /\ sstate'[s] = "awaiting_ack")
       /\ See(34, "WAIT_SETTLED", from = "pending_async" /\ sstate'[s] = "ready" /\ e.out.outcomes = d.out.outcomes)
       /\ See(35, "SETTLED", from = "awaiting_ack" /\ sstate'[s] = "ready")
       /\ See(36, "DEADLINE or INTERRUPTED", from = "awaiting_ack" /\ sstate'[s] = "pending_async")
       /\ See(37, "ABANDON", from = "pending_async" /\ sstate'[s] = "ready" /\ e.out.outcomes # d.out.outcomes)
       /\ SeeIn(40, "CLOSE of a sender", from, sstate'[s] = Final /\ ~stays)
       /\ SeeIn(45, "STALE", from, stays /\ ~Loses /\ e = d /\ \E m \in answers \ answers' : m.s = s)
       /\ \A w \in Workers :
            LET old == d.members[w] new == e.members[w] IN
            /\ SeeIn(50, "ARRIVED", from, old.link_state = "EXPECTED" /\ new.link_state = "UP" /\ e.out = d.out
                                          /\ new.served = 0)
            /\ SeeIn(55, "REPLY", from, d.out.owed[w] # 0 /\ e.out.owed[w] = 0 /\ new.link_state = "UP" /\ stays)
            /\ SeeIn(60, "LOST", from, old.link_state \in {"EXPECTED", "UP"} /\ new.link_state = "LOST" /\ stays)
            /\ SeeIn(195, "a handshake is refused", from, old.link_state \in {"EXPECTED", "UP"} /\ new.link_state = "REFUSED")
            /\ SeeIn(65, "JOIN", from, new.link # old.link /\ stays)
            /\ SeeIn(70, "CAUGHT_UP", from, old.catching # 0 /\ new.catching = 0 /\ new.link_state = "UP" /\ stays
                                            /\ e.out = d.out)
            /\ SeeIn(75, "REMOVE", from, old.link_state \in {"LOST", "EXPECTED"} /\ new.link_state = "NONE" /\ stays)
            /\ SeeIn(80, "Bye", from, old.link_state = "UP" /\ new.link_state = "NONE")
            /\ See(86, "a newcomer is due", old.link = 0 /\ new.due # 0)
            /\ See(87, "a worker comes again", old.link_state = "NONE" /\ new.link = 2)
            /\ See(88, "a missed update is due", old.link_state = "LOST" /\ new.due > d.dueAll)
            /\ SeeIn(180, "some are sent to, not all", sstate'[s], e.serial # d.serial /\ old.link_state = "UP"
                                                                   /\ e.out.outcomes[w] = "NONE")
            /\ See(90, "a refusal ends a wait", from = "awaiting_ack" /\ sstate'[s] = "ready"
                                                 /\ e.out.outcomes[w] = "REFUSED" /\ d.out.owed[w] # 0)
            /\ See(91, "a loss ends a wait", from = "awaiting_ack" /\ sstate'[s] = "ready"
                                              /\ e.out.outcomes[w] = "LOST" /\ d.out.owed[w] # 0)
            /\ See(92, "an ack comes before its Hello", old.link_state = "EXPECTED" /\ new.served # 0)
            /\ See(93, "an open link is closed at its far end", ~gone[s][w] /\ gone'[s][w])
  /\ See(95, "a copy is made", slife[s] = "unborn" /\ slife'[s] # "unborn")
  /\ See(98, "the lowest clock is taken", e.incarnation = 1)
  /\ See(96, "a trainer dies in a send", slife'[s] = "dead" /\ blocked[s])

\* The rows of a receiver's table, by what they do to its data.
ReceiverRowsSeen == \A w \in Workers :
  LET d == rdata[w] e == rdata'[w] from == rstate[w] stays == rstate'[w] = rstate[w]
      New(kind) == {m \in answers' \ answers : m.w = w /\ m.kind = kind}
      Read(v) == {m \in messages \ messages' : m.w = w /\ ((m.v = 0) <=> (v = 0))} IN
  /\ See(100, "CONNECT of a receiver", from = "uninitialized" /\ rstate'[w] = "ready")
  /\ See(101, "UPDATE", from = "ready" /\ rstate'[w] = "pending_async")
  /\ See(102, "NEWER", d.pending # NoPayload /\ e.pending # NoPayload /\ e.pending # d.pending)
  /\ See(103, "APPLIED", rstate'[w] = "awaiting_ack" /\ e.decided # d.decided /\ e.answer = "ACK")
  /\ See(104, "REFUSED", rstate'[w] = "awaiting_ack" /\ e.decided # d.decided /\ e.answer = "REFUSED")
  /\ See(105, "ANSWERED", from = "awaiting_ack" /\ rstate'[w] = "ready" /\ e.link = d.link)
  /\ See(106, "an answer to nobody", from = "awaiting_ack" /\ rstate'[w] = "ready" /\ answers' = answers)
  /\ See(107, "a new life", d # NewReceiver /\ e = NewReceiver)
  /\ See(108, "a new life is greeted", e.link # NoLink /\ e.link[2] = 2 /\ d = NewReceiver)
  /\ See(109, "a refusal is answered again", stays /\ New("REFUSED") # {} /\ e = d /\ Read(1) # {})
  /\ SeeIn(110, "REJECTED, fenced", from, stays /\ New("FENCED") # {})
  /\ SeeIn(115, "REJECTED, misfit", from, stays /\ \E m \in New("REFUSED") : m.v = 0)
  /\ SeeIn(120, "TAKEOVER", from, d.link # NoLink /\ e.link # NoLink /\ e.link # d.link)
  /\ SeeIn(125, "DUPLICATE", from, stays /\ ~Loses /\ e = d /\ Read(1) # {} /\ New("STALE") = {} /\ d.link # NoLink)
  /\ SeeIn(130, "STALE for a receiver", from, New("STALE") # {})
  /\ SeeIn(135, "LINK_DOWN", from, d.link # NoLink /\ e.link = NoLink /\ e # NewReceiver /\ rstate'[w] # Final)
  /\ SeeIn(140, "CLOSE of a receiver", from, ~stays /\ rstate'[w] = Final /\ New("FAILED") = {})
  /\ SeeIn(185, "CLOSE of a receiver, failed", from, ~stays /\ rstate'[w] = Final /\ e.served = d.served
                                                      /\ New("FAILED") # {})
  /\ SeeIn(190, "LINK_DOWN, failed", from, rstate'[w] = "uninitialized" /\ New("FAILED") # {})
  /\ See(146, "LINK_DOWN before any Hello", from = "uninitialized" /\ stays /\ ~Loses /\ Read(0) # {})
  /\ See(147, "LINK_DOWN of a link that is late", d.link # NoLink /\ stays /\ ~Loses /\ e = d /\ Read(0) # {}
                                                   /\ answers' = answers)
  /\ See(148, "BROKEN", from = "pending_async" /\ rstate'[w] = Final /\ New("FAILED") # {}
                         /\ d.served # NoPayload /\ e.served = NoPayload)
  /\ See(206, "DEFERRED", from = "pending_async" /\ e.answer = "DEFERRED" /\ e.decided # d.decided)
  /\ SeeIn(207, "SEND_ACK", from, stays /\ d.answer = "DEFERRED" /\ e.answer = "ACK")
  /\ See(213, "a deferred answer leaves for a newer version", d.answer = "DEFERRED" /\ e.answer = "ACK" /\ e.pending # d.pending
                                                             /\ New("ACK") # {})
  /\ See(214, "a deferred version comes again", d.answer = "DEFERRED" /\ e = d /\ stays /\ ~Loses /\ Read(1) # {})
  /\ See(215, "a deferred answer leaves elsewhere", d.answer = "DEFERRED" /\ New("ACK") # {})
  /\ SeeIn(200, "INVALIDATED", from, stays /\ d.served # NoPayload /\ e.served = NoPayload)
  /\ See(149, "what was pending is dropped with its link", d.pending # NoPayload /\ e.pending = NoPayload
                                                            /\ e.link = NoLink)
  /\ See(150, "serves on after its link", d.link = NoLink /\ d.served # NoPayload /\ e.link # NoLink)
  /\ See(151, "a version comes twice", stays /\ e = d /\ Read(1) # {} /\ New("ACK") # {} /\ d.link[2] = 2)

\* It would have an effect if it were read.
WouldCount(m) ==
  LET d == sdata[m.s] IN
  /\ Open(m.s, m.w, m.k) /\ m.inc = d.incarnation
  /\ \/ m.kind = "HELLO" /\ d.members[m.w].link_state = "EXPECTED"
     \/ m.kind = "BYE"
     \/ d.out.owed[m.w] = m.k /\ m.v = d.version

OnlyAnswersChange == UNCHANGED <<sender, receiver, messages, gone>>

\* An answer that would have an effect vanishes unread.
LostAnswer(kind) == OnlyAnswersChange /\ \E m \in answers \ answers' : WouldCount(m) /\ m.kind = kind
\* An answer of a broken link, or of one that works, is cut; some others stay, or none.
CutAnswer(broken, others) ==
  ~Loses /\ OnlyAnswersChange /\ \E m \in answers \ answers' :
    WouldCount(m) /\ gone[m.s][m.w] = broken /\ others = \E n \in answers' : n.s = m.s /\ n.w = m.w /\ n.k = m.k

\* What lingers on links that ended, and what the network does.
NetworkSeen ==
  /\ See(160, "a message of an ended link is read", \E w \in Workers :
       rstate[w] = "ready" /\ rstate'[w] = "pending_async" /\ ~Open(rdata[w].link[1], w, rdata[w].link[2]))
  /\ See(161, "an answer over an ended link is read", \E m \in answers \ answers' :
       ~Loses /\ m.k # sdata[m.s].members[m.w].link /\ sdata' = sdata)
  /\ See(162, "a message is lost", messages' # messages /\ UNCHANGED <<sdata, rdata, answers, gone>>)
  /\ See(163, "an answer is lost", answers' # answers /\ UNCHANGED <<sdata, rdata, messages, gone>>)
  /\ See(166, "an ack is lost", Loses /\ LostAnswer("ACK"))
  /\ See(167, "a refusal is lost", Loses /\ LostAnswer("REFUSED"))
  /\ See(173, "a goodbye is lost", LostAnswer("BYE"))
  /\ See(174, "all answers of a broken link are cut", CutAnswer(TRUE, FALSE))
  /\ See(175, "some answers of a broken link are cut", CutAnswer(TRUE, TRUE))
  /\ See(176, "all answers of a link that works are cut", CutAnswer(FALSE, FALSE))
  /\ See(177, "some answers of a link that works are cut", CutAnswer(FALSE, TRUE))
  /\ See(168, "a loss overtakes an answer", \E m \in answers : gone[m.s][m.w] /\ m.kind \in {"HELLO", "ACK"}
       /\ sdata[m.s].members[m.w].link = m.k /\ sdata'[m.s].members[m.w].link_state = "LOST")
  /\ See(164, "a message overtakes another", \E w \in Workers : rdata'[w].pending # rdata[w].pending
       /\ \E m \in messages : m.w = w /\ m.v # 0 /\ m.p < rdata'[w].pending[3] /\ <<m.s, m.k>> = rdata[w].link)
  /\ See(169, "a message is read before an older one to another worker", \E w \in Workers :
       rdata'[w].pending # rdata[w].pending /\ \E m \in messages : m.w # w /\ m.p < rdata'[w].pending[3])
  /\ See(170, "a message is read before an older one over another link", \E w \in Workers :
       /\ rdata'[w].pending # rdata[w].pending
       /\ \E m \in messages : m.w = w /\ <<m.s, m.k>> # rdata[w].link /\ m.p < rdata'[w].pending[3])
  /\ See(171, "an answer is read before an older one of another worker", \E s \in Senders, w \in Workers :
       /\ sdata[s].out.owed[w] # 0 /\ sdata'[s].out.outcomes[w] = "APPLIED"
       /\ \E m \in answers : m.s = s /\ m.w # w /\ m.p < sdata[s].serial)
  /\ See(172, "an answer is read before an older one over another link", \E s \in Senders, w \in Workers :
       /\ sdata[s].out.owed[w] # 0 /\ sdata'[s].out.outcomes[w] = "APPLIED"
       /\ \E m \in answers : m.s = s /\ m.w = w /\ m.k # sdata[s].members[w].link /\ m.p < sdata[s].serial)
  /\ See(165, "an answer overtakes another", \E s \in Senders, w \in Workers :
       /\ sdata[s].out.owed[w] # 0 /\ sdata'[s].out.outcomes[w] = "APPLIED"
       /\ \E m \in answers' : m.s = s /\ m.w = w /\ m.p < sdata[s].serial /\ m.k = sdata[s].members[w].link)

LookOut == SituationsSeen /\ SenderRowsSeen /\ ReceiverRowsSeen /\ NetworkSeen
=============================================================================
