------------------------------ MODULE Inductive ------------------------------
(***************************************************************************)
(* Why the protocol is safe, in one invariant that each step keeps.        *)
(*                                                                         *)
(* TLC starts from *every* state that satisfies IndInv, reachable or not,  *)
(* and takes every step.  So what is proved needs no run from Init, and no *)
(* depth: within the constants, whatever the state is in which IndInv      *)
(* holds, the next one satisfies it too, and every action property holds   *)
(* of the step between them.                                               *)
(*                                                                         *)
(* IndInv is about the machines, and about each message by itself.  With   *)
(* links that reorder, duplicate and lose, no step requires the absence of *)
(* a message, and each reads at most one; so two messages in flight, the   *)
(* one that is read and another that must stay right, stand for any        *)
(* number.  Steps over other links are steps over these too, except that a *)
(* message vanishes when it is read; IndInv requires no message to exist.  *)
(* What is on a link when the sender closes its end is gone (~Lingers).    *)
(***************************************************************************)
EXTENDS AckProtocol

ASSUME Reorders /\ Duplicates /\ Loses /\ ~Lingers

-----------------------------------------------------------------------------
(* One sender, by itself *)

IsOpenEntry(e) == e.link_state \in {"EXPECTED", "UP"}

EntryOK(e) ==
  /\ e.link_state = "NONE" => e = Entry(e.link, "NONE", 0, 0, 0, 0)
  /\ e.link_state # "NONE" => e.link # 0
  /\ e.link_state = "EXPECTED" => e.served = 0
  /\ e.fence # 0 => e.link_state = "LOST" /\ May("copy")
  /\ e.link_state \in Ended => e.catching = 0
  /\ e.link_state = "REFUSED" => May("misfit")
  /\ e.served <= e.due /\ e.catching <= e.due

Entries == {e \in [link : 0..MaxLink, link_state : LinkStates, served : 0..MaxVersion, due : 0..MaxVersion,
                   catching : 0..MaxVersion, fence : Incarnations] : EntryOK(e)}

\* A lone sender meets no fence.
Given == IF Cardinality(Senders) = 1 THEN 0..MaxClock ELSE Incarnations

\* What a sender's data is made of, once each field that follows from others is left out.
Kernels == [inc : Given, version : 0..MaxVersion, dueAll : 0..MaxVersion, members : [Workers -> Entries],
            outcomes : [Workers -> Outcomes], did : SUBSET Workers]

Data(c) == [
  incarnation |-> c.inc, version |-> c.version, serial |-> c.version, dueAll |-> c.dueAll, members |-> c.members,
  out |-> [version |-> c.version, did |-> c.did, outcomes |-> c.outcomes,
           owed |-> [w \in Workers |-> IF c.outcomes[w] = "PENDING" THEN c.members[w].link ELSE 0]]
]

AliveOK(state, d) ==
  LET owing == {w \in Workers : d.out.outcomes[w] = "PENDING"}
      outstanding == state \in {"pending_async", "awaiting_ack"} IN
  /\ d.serial = d.version /\ d.out.version = d.version /\ d.dueAll <= d.version
  /\ state = "uninitialized" => d.incarnation = 0
  /\ d.incarnation = 0 =>
       /\ state \in {"uninitialized", "closed"} /\ d.version = 0
       /\ \A w \in Workers : d.members[w].link_state \in {"NONE", "EXPECTED"} /\ d.members[w].due = 0
  /\ d.version = 0 => d.out = NewSender.out /\ ~outstanding
  /\ state = "awaiting_ack" => owing # {}
  /\ state = "pending_async" => \E f \in {"async", "deadline", "interrupt"} : May(f)
  /\ state = "closed" => May("close")
  /\ ~outstanding => owing = {} /\ d.out.did = {}
  /\ \A w \in Workers :
       LET e == d.members[w] outcome == d.out.outcomes[w] IN
       /\ EntryOK(e)
       /\ e.due <= d.version /\ (e.link_state # "NONE" => d.dueAll <= e.due)
       /\ d.out.owed[w] = IF outcome = "PENDING" THEN e.link ELSE 0
       /\ outcome = "PENDING" => IsOpenEntry(e) /\ e.due = d.version
       /\ outcome = "ABANDONED" => ~outstanding /\ (May("abandon") \/ May("close"))
       /\ outcome = "APPLIED" /\ outstanding => w \in d.out.did

SenderOK(life, state, d) == d.incarnation \in Given /\
  CASE life = "unborn" -> state = Initial /\ d = NewSender
    [] life = "dead" ->
         /\ state = Initial /\ d.members = NewSender.members /\ d.out = NewSender.out /\ d.dueAll = 0
         /\ d.serial = d.version /\ (d.incarnation = 0 => d.version = 0)
    [] OTHER -> AliveOK(state, d)

Alive == {<<"alive", state, d>> : state \in States, d \in {Data(c) : c \in Kernels}}
Dead == {<<"dead", Initial, [NewSender EXCEPT !.incarnation = i, !.version = v, !.serial = v]>> :
           i \in Given, v \in 0..MaxVersion}
LivesOfSenders == {t \in Alive \cup (IF May("death") THEN Dead ELSE {}) \cup {<<"unborn", Initial, NewSender>>} :
                     SenderOK(t[1], t[2], t[3])}

-----------------------------------------------------------------------------
(* One receiver, by itself *)

Keys == {<<i, v, v>> : i \in Incarnations \ {0}, v \in 1..MaxVersion} \cup {NoPayload}
Lowest(a, b) == a = b \/ Lower(a, b)

ReceiverOK(state, d) ==
  /\ d.link = NoLink <=> state \in {"uninitialized", "closed"}
  /\ d.pending # NoPayload <=> state = "pending_async"
  /\ d.met = d.fence /\ d.live = <<d.served, d.served>>
  /\ d.link # NoLink => d.fence # 0
  /\ d.decided[1] <= d.fence
  /\ d.pending # NoPayload => d.pending[1] = d.fence /\ Lower(d.decided, d.pending)
  /\ d.decided = NoPayload <=> d.answer = "NONE"
  /\ Lowest(d.served, d.decided)
  /\ d.answer = "ACK" => d.served = d.decided \/ (state = "closed" /\ d.served = NoPayload)
  /\ d.answer = "REFUSED" => d.served # d.decided
  /\ state = "awaiting_ack" => d.answer # "NONE" /\ d.decided[1] = d.fence

LivesOfReceivers == {t \in States \X
  {[link |-> l, fence |-> f, met |-> f, decided |-> c, answer |-> a, pending |-> p, served |-> v, live |-> <<v, v>>] :
     l \in {NoLink} \cup (Senders \X (1..MaxLink)), f \in Incarnations, c \in Keys, a \in {"NONE", "ACK", "REFUSED"},
     p \in Keys, v \in Keys} : ReceiverOK(t[1], t[2])}

-----------------------------------------------------------------------------
(* Between them *)

\* Its sender has dispatched that.
Dispatched(key) == key = NoPayload \/
  (key[2] = key[3] /\ key[2] # 0 /\ \E s \in Senders : sdata[s].incarnation = key[1] /\ key[2] <= sdata[s].version)
UsedIncarnations == {0} \cup {sdata[s].incarnation : s \in Senders}

\* The workers that have applied the outstanding update are recorded.
Noted(w, key) == \A s \in Senders :
  IsOutstanding(s) /\ key[1] = sdata[s].incarnation /\ key[2] = sdata[s].version => w \in sdata[s].out.did

PairsOK ==
  /\ \A s, t \in Senders : s # t /\ sdata[s].incarnation # 0 => sdata[s].incarnation # sdata[t].incarnation
  /\ \A w \in Workers :
       LET d == rdata[w] IN
       /\ d.fence \in UsedIncarnations /\ Dispatched(d.decided) /\ Dispatched(d.pending) /\ Dispatched(d.served)
       /\ d.answer = "ACK" => Noted(w, d.decided)
       /\ d.link # NoLink =>
            LET s == d.link[1] IN
            /\ slife[s] # "unborn" /\ d.fence = sdata[s].incarnation
            /\ slife[s] = "alive" => d.link[2] <= sdata[s].members[w].link
  /\ \A s \in Senders : blocked[s] <=> sstate[s] = "awaiting_ack"
  /\ \A s \in Senders, w \in Workers :
       LET k == sdata[s].members[w].link IN
       /\ sdata[s].members[w].fence # 0 => sdata[s].members[w].fence \in UsedIncarnations /\ sdata[s].members[w].fence > sdata[s].incarnation
       /\ gone[s][w] => Open(s, w, k) /\ Link(w) # <<s, k>>
       /\ Open(s, w, k) /\ rstate[w] = "closed" => gone[s][w]

MessageOK(m) ==
  /\ Open(m.s, m.w, m.k) /\ ~gone[m.s][m.w]
  /\ m.p = m.v /\ m.v <= sdata[m.s].version

AnswerOK(m) ==
  LET key == <<m.inc, m.v, m.p>>
      d == rdata[m.w]
      here == Link(m.w) = <<m.s, m.k>> IN
  /\ Open(m.s, m.w, m.k) /\ (here \/ gone[m.s][m.w])
  /\ m.inc = sdata[m.s].incarnation /\ m.fence \in UsedIncarnations
  /\ CASE m.kind = "HELLO" -> m.v = 0 /\ m.p = 0 /\ m.fence = 0
       [] m.kind = "BYE" -> m.v = 0 /\ m.p = MaxVersion + 1 /\ m.fence = 0 /\ ~here
       [] m.kind = "FAILED" -> m.v = 0 /\ m.p = MaxVersion + 1 /\ ~here
       [] m.kind = "FENCED" -> m.v = 0 /\ m.p \in {0, MaxVersion + 1} /\ m.fence > m.inc /\ ~here
       [] m.kind = "REFUSED" /\ m.v = 0 -> m.p = 0 /\ ~here
       [] m.kind = "ACK" -> m.v # 0 /\ Dispatched(key) /\ m.fence = 0 /\ Noted(m.w, key)
       [] m.kind = "REFUSED" ->
            /\ Dispatched(key)
            /\ here => d.served # key /\ Lowest(key, d.decided) /\ (key = d.decided => d.answer = "REFUSED")
       [] m.kind = "SUPERSEDED" -> m.v # 0 /\ Dispatched(key) /\ (here => d.served # key /\ Lower(key, Newest(m.w)))
       [] OTHER -> m.v # 0 /\ Dispatched(key)

MachinesOK ==
  /\ \A s \in Senders : SenderOK(slife[s], sstate[s], sdata[s])
  /\ \A w \in Workers : ReceiverOK(rstate[w], rdata[w])

IndInv ==
  /\ TypeOK /\ MachinesOK /\ PairsOK
  /\ \A m \in messages : MessageOK(m)
  /\ \A m \in answers : AnswerOK(m)

-----------------------------------------------------------------------------
(* Every state of it, with at most two messages *)

Few(set) == {{a, b} : a \in set, b \in set} \cup {{}}
InFlight == 2

PossibleMessages == {m \in {Message(s, w, k, v, v) : s \in Senders, w \in Workers, k \in 1..MaxLink, v \in 0..MaxVersion} :
                      MessageOK(m)}
PossibleAnswers ==
  {m \in UNION {{Word(s, w, sdata[s].members[w].link, <<sdata[s].incarnation, v, p>>, kind, f) :
                   v \in 0..MaxVersion, p \in 0..(MaxVersion + 1), kind \in {"HELLO", "ACK", "BYE"} \cup RefusalKinds,
                   f \in UsedIncarnations} : s \in {t \in Senders : Connected(t)}, w \in Workers} : m.k # 0 /\ AnswerOK(m)}

IndInit ==
  /\ \E lives \in [Senders -> LivesOfSenders] :
       /\ slife = [s \in Senders |-> lives[s][1]]
       /\ sstate = [s \in Senders |-> lives[s][2]]
       /\ sdata = [s \in Senders |-> lives[s][3]]
       /\ blocked = [s \in Senders |-> lives[s][2] = "awaiting_ack"]
  /\ \E lives \in [Workers -> LivesOfReceivers] :
       /\ rstate = [w \in Workers |-> lives[w][1]]
       /\ rdata = [w \in Workers |-> lives[w][2]]
  /\ gone \in [Senders -> [Workers -> BOOLEAN]]
  /\ PairsOK
  /\ messages \in Few(PossibleMessages)
  /\ answers \in Few(PossibleAnswers)
  /\ Cardinality(messages) + Cardinality(answers) <= InFlight

\* Take one step from each state. States over the message bound, or seen before, are checked but not expanded.
FewInFlight == Cardinality(messages) + Cardinality(answers) <= InFlight

\* Init is one of them.
ASSUME \A s \in Senders : <<IF s = 1 THEN "alive" ELSE "unborn", Initial, NewSender>> \in LivesOfSenders

IndSpec == IndInit /\ [][Next]_vars
=============================================================================
