----------------------------- MODULE Challenge -----------------------------
(***************************************************************************)
(* The exchange of challenges under a shared key: sealing.py. Messages are *)
(* numbered by store/seals.py in a store, and by sealing.py and            *)
(* calls/gates.py for calls.                                               *)
(*                                                                         *)
(* A sender draws a name for each link of its own.  A worker draws a nonce *)
(* for each end that it makes.  What the sender says before it has met the *)
(* nonce is EARLY, under a MAC of the name; afterwards PROVEN, under a MAC *)
(* of both.  The worker holds back what it reads until something PROVEN    *)
(* has come.                                                               *)
(*                                                                         *)
(* An attacker sees every envelope and keeps it.  It delivers any of them  *)
(* to any end at any time, again, in another order, on another link, to    *)
(* its author, or not at all; and it can have a worker make an end of any  *)
(* link that was ever announced, as a client that writes into the store    *)
(* can, or a worker that restarts does. It has no key, so it cannot seal.  *)
(*                                                                         *)
(* Abstracted: a MAC is the content that it covers, so it cannot be        *)
(* guessed; names and nonces never repeat; a payload is its digest, which  *)
(* is content; a link that fails on a message it does not believe is       *)
(* modelled as one that stays and has read nothing. Unsealed messages (a   *)
(* refusal, an announcement, an end mark) are not modelled: they can end a *)
(* link, and carry nothing.                                                *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, Sequences

CONSTANTS
  Senders,   \* 1..n: the ends of the one trainer, one a link; each draws a name
  Workers,   \* 1..n: the ends of the one worker; each draws a nonce
  MaxSaid,   \* messages of a sender's end
  MaxAnswers,   \* answers of a worker's end
  Way,       \* "row": numbers follow one another; "calls": each number counts once
  Careless   \* rules that are removed for the revert tests; {} otherwise

VARIABLES
  wire,      \* the envelopes that were ever sealed
  said,      \* said[s]: what a sender's end sealed, in order
  met,       \* met[s]: the worker's end whose nonce it took; 0: none's
  heard,     \* heard[s]: the answers that it believed, in order
  link,      \* link[w]: the sender's end whose link a worker's end is of; 0: it was not made yet
  read,      \* read[w]: what it read, in order
  kept,      \* kept[w]: numbers of calls that it keeps until their sender has proved itself
  proven,    \* proven[w]: something PROVEN has come
  answered       \* answered[w]: how many answers it sealed

vars == <<wire, said, met, heard, link, read, kept, proven, answered>>

AllRules == {
  "WorkerChallenges", \* the worker's nonce is under the MACs of a session
  "NameInMac",        \* the link's name is under every MAC
  "RoleInMac",        \* the kind, and so the direction, is under every MAC
  "Numbered",         \* a number is read once, and in its turn
  "HeldBack",         \* what came early is held back until its sender has proved itself
  "FirstStays"        \* a sender's end takes the nonce of one worker's end
}
ASSUME Careless \subseteq AllRules /\ Way \in {"row", "calls"}
Follows(rule) == rule \notin Careless

-----------------------------------------------------------------------------
(* Envelopes *)

Numbers == 0..(IF MaxSaid > MaxAnswers THEN MaxSaid ELSE MaxAnswers)
Nothing == <<"nothing", 0, 0>>
Message(s, n) == <<"message", s, n>>
Answer(w, n) == <<"answer", w, n>>
Nonce(w) == <<"nonce", w, 0>>
Contents ==
  {Nothing} \cup {Message(s, n) : s \in Senders, n \in Numbers}
  \cup {Answer(w, n) : w \in Workers, n \in Numbers} \cup {Nonce(w) : w \in Workers}

\* What a MAC covers beside number and content.
Mac(kind, s, w) == <<
  IF Follows("RoleInMac") THEN kind ELSE "any",
  IF Follows("NameInMac") THEN s ELSE 0,
  IF Follows("WorkerChallenges") THEN w ELSE 0>>
Envelope(kind, s, w, n, content) == [mac |-> Mac(kind, s, w), n |-> n, content |-> content]

\* What an end expects by its numbers.
InTurn(n, count) == n = count \/ ~Follows("Numbered")

-----------------------------------------------------------------------------
(* The sender's end *)

Sealed(s, n, content) ==
  IF met[s] = 0 THEN Envelope("EARLY", s, 0, n, content) ELSE Envelope("PROVEN", s, met[s], n, content)

\* Ends are numbered in the order in which they begin.
Say(s) ==
  /\ Len(said[s]) < MaxSaid /\ \A t \in Senders : t < s => said[t] # <<>>
  /\ said' = [said EXCEPT ![s] = Append(@, Message(s, Len(@)))]
  /\ wire' = wire \cup {Sealed(s, Len(said[s]), Message(s, Len(said[s])))}
  /\ UNCHANGED <<met, heard, link, read, kept, proven, answered>>

\* It proves itself, by an empty message with its own number, or by an empty repetition of a call.
Prove(s, n) ==
  /\ met[s] # 0
  /\ \/ Way = "row" /\ n = Len(said[s]) /\ n < MaxSaid /\ said' = [said EXCEPT ![s] = Append(@, Nothing)]
     \/ Way = "calls" /\ n < Len(said[s]) /\ said' = said
  /\ wire' = wire \cup {Sealed(s, n, Nothing)}
  /\ UNCHANGED <<met, heard, link, read, kept, proven, answered>>

\* A challenge arrives.
ReadChallenge(s, w) ==
  /\ Envelope("CHALLENGE", s, 0, 0, Nonce(w)) \in wire
  /\ met[s] = 0 \/ ~Follows("FirstStays")
  /\ met' = [met EXCEPT ![s] = w]
  /\ UNCHANGED <<wire, said, heard, link, read, kept, proven, answered>>

\* An answer comes. In a row the challenge has number 0; of calls, which come home in any order, a number counts once.
Hear(s, n, content) ==
  /\ met[s] # 0
  /\ Envelope("ANSWER", s, met[s], n, content) \in wire
  /\ \/ Way = "row" /\ InTurn(n, Len(heard[s]) + 1)
     \/ Way = "calls" /\ (InTurn(n, n) /\ \A i \in 1..Len(heard[s]) : heard[s][i] # content)
  /\ Len(heard[s]) < MaxAnswers + 1
  /\ heard' = [heard EXCEPT ![s] = Append(@, content)]
  /\ UNCHANGED <<wire, said, met, link, read, kept, proven, answered>>

-----------------------------------------------------------------------------
(* The worker's end *)

\* An end is created for a link that is announced, or announced again.
Take(w, s) ==
  /\ link[w] = 0 /\ \A x \in Workers : x < w => link[x] # 0
  /\ link' = [link EXCEPT ![w] = s]
  /\ wire' = wire \cup {Envelope("CHALLENGE", s, 0, 0, Nonce(w))}
  /\ UNCHANGED <<said, met, heard, read, kept, proven, answered>>

Reads(w, n, content) ==
  /\ InTurn(n, Len(read[w])) /\ Len(read[w]) < MaxSaid + 1
  /\ read' = [read EXCEPT ![w] = Append(@, content)]

\* A message that is sealed with the name alone.
ReadEarly(w, n, content) ==
  /\ link[w] # 0
  /\ Envelope("EARLY", link[w], 0, n, content) \in wire
  /\ IF Way = "calls" /\ ~proven[w]
     THEN kept' = [kept EXCEPT ![w] = @ \cup {n}] /\ read' = read
     ELSE Reads(w, n, content) /\ kept' = kept
  /\ UNCHANGED <<wire, said, met, heard, link, proven, answered>>

\* Messages sealed for both challenges. An empty one releases the held call with the same number.
ReadProven(w, n, content) ==
  /\ link[w] # 0
  /\ Envelope("PROVEN", link[w], w, n, content) \in wire
  /\ proven' = [proven EXCEPT ![w] = TRUE]
  /\ IF Way = "row" \/ content # Nothing THEN Reads(w, n, content) /\ kept' = kept
     ELSE IF n \in kept[w] THEN Reads(w, n, Message(link[w], n)) /\ kept' = [kept EXCEPT ![w] = @ \ {n}]
     ELSE UNCHANGED <<read, kept>>
  /\ UNCHANGED <<wire, said, met, heard, link, answered>>

\* The messages that the worker's end accepts.
Believed(w) == IF proven[w] \/ ~Follows("HeldBack") THEN read[w] ELSE <<>>

SealAnswer(w) ==
  LET n == IF Way = "row" THEN answered[w] + 1 ELSE answered[w] IN
  /\ Believed(w) # <<>> /\ answered[w] < MaxAnswers
  /\ answered' = [answered EXCEPT ![w] = @ + 1]
  /\ wire' = wire \cup {Envelope("ANSWER", link[w], w, n, Answer(w, n))}
  /\ UNCHANGED <<said, met, heard, link, read, kept, proven>>

-----------------------------------------------------------------------------

Next ==
  \/ \E s \in Senders : Say(s)
  \/ \E s \in Senders, n \in Numbers : Prove(s, n)
  \/ \E s \in Senders, w \in Workers : ReadChallenge(s, w)
  \/ \E s \in Senders, n \in Numbers, content \in Contents : Hear(s, n, content)
  \/ \E w \in Workers, s \in Senders : Take(w, s)
  \/ \E w \in Workers, n \in Numbers, content \in Contents : ReadEarly(w, n, content)
  \/ \E w \in Workers, n \in Numbers, content \in Contents : ReadProven(w, n, content)
  \/ \E w \in Workers : SealAnswer(w)

Init ==
  /\ wire = {}
  /\ said = [s \in Senders |-> <<>>] /\ met = [s \in Senders |-> 0] /\ heard = [s \in Senders |-> <<>>]
  /\ link = [w \in Workers |-> 0] /\ read = [w \in Workers |-> <<>>] /\ kept = [w \in Workers |-> {}]
  /\ proven = [w \in Workers |-> FALSE] /\ answered = [w \in Workers |-> 0]

Spec == Init /\ [][Next]_vars

-----------------------------------------------------------------------------
(* Properties *)

Begins(part, whole) == Len(part) <= Len(whole) /\ \A i \in 1..Len(part) : part[i] = whole[i]

\* A worker's end accepts what its sender's end said, in order and once, in a session with that end.
OnlyTheSender == \A w \in Workers :
  proven[w] \/ Believed(w) # <<>> => met[link[w]] = w /\ Begins(Believed(w), said[link[w]])

\* A sender's end accepts what the worker's end whose nonce it took said, in this session, each once; in a row in order.
OnlyTheWorker == \A s \in Senders : heard[s] # <<>> =>
  /\ link[met[s]] = s
  /\ \A i \in 1..Len(heard[s]) : \E n \in Numbers : heard[s][i] = Answer(met[s], n) /\ n <= answered[met[s]]
  /\ Cardinality({heard[s][i] : i \in 1..Len(heard[s])}) = Len(heard[s])
  /\ Way = "row" => \A i \in 1..Len(heard[s]) : heard[s][i] = Answer(met[s], i)

-----------------------------------------------------------------------------
(* Canaries: situations that must be reachable, or the proofs would be vacuous *)

\* Two messages are accepted, and an answer to them.
NobodyIsBelieved == \A s \in Senders : met[s] = 0 \/ Len(Believed(met[s])) < 2 \/ heard[s] = <<>>

\* A link is offered again: two of the worker's ends have read what its sender said early, and one of them believes it.
NothingIsOfferedAgain == \A w, x \in Workers :
  w # x /\ link[w] = link[x] /\ proven[w] => read[x] = <<>> /\ kept[x] = {}

\* Of two calls the one that was sealed first comes behind the proof of its sender.
NothingIsOvertaken == [][\A w \in Workers, n \in Numbers, content \in Contents :
  ReadEarly(w, n, content) => ~proven[w]]_vars
=============================================================================
