------------------------------- MODULE Loader -------------------------------
(***************************************************************************)
(* A loader in place of a model: weightsync/weights/loader.py, and the     *)
(* swap in engine/applier.py.                                              *)
(*                                                                         *)
(* In AckProtocol.tla a version goes live in one action, Applied.  An      *)
(* engine is loaded tensor by tensor by the user's code, and a load cannot *)
(* be undone: the code may write each tensor when it takes it or later,    *)
(* and it may end at any moment, by returning or by raising.  Here its     *)
(* three ends are shown to be the actions Applied, Refused and Broken of   *)
(* AckProtocol.tla.                                                        *)
(*                                                                         *)
(* Abstracted: one worker; two tensors; versions in order.  A death during *)
(* a load is like any other death.                                         *)
(***************************************************************************)
EXTENDS Integers, Sequences

CONSTANTS
  MaxVersion,
  Careless     \* rules that are removed for the revert tests; {} otherwise

AllRules == {
  "AnswerLast",        \* the answer leaves once the loader has ended
  "AllTaken",          \* a loader that returned without taking every tensor is not acked
  "PartIsBroken",      \* one that took some of them, and returned, has perhaps begun
  "PartIsReported",     \* the loader's duty: it raises PartlyLoadedError if it has begun to write
  "WritesAll",         \* the loader's duty: when it returns, it has written what it took
  "ServingExcludes",   \* it runs between two forwards
  "BrokenIsTheEnd",    \* no forward begins once a load broke
  "EndsOnce",          \* a load that has returned or raised is over
  "RefusalIsAnswered"  \* a loader that raised is answered for, like one that returned
}
ASSUME Careless \subseteq AllRules

VARIABLES
  content,    \* the version of each of the engine's tensors; 0: its own from the start
  served,     \* the version that the receiver serves; 0: the engine's own from the start
  version,    \* the newest version that arrived
  loading,    \* whether the loader runs, for that version
  taken,      \* how many tensors it has taken
  answers,    \* what was answered of each version
  closed,     \* the receiver is closed, and serves nothing
  reading     \* a forward: [of, seen]; of = -1: none

vars == <<content, served, version, loading, taken, answers, closed, reading>>

NoRead == [of |-> -1, seen |-> <<>>]
Versions == 1..MaxVersion
Tensors == 1..2
Follows(rule) == rule \notin Careless

Init ==
  /\ content = <<0, 0>> /\ served = 0 /\ version = 0 /\ loading = FALSE /\ taken = 0
  /\ answers = [v \in Versions |-> "NONE"] /\ closed = FALSE /\ reading = NoRead

-----------------------------------------------------------------------------
(* The receiver and the loader *)

Begin ==
  /\ ~closed /\ ~loading /\ version < MaxVersion
  /\ reading = NoRead \/ ~Follows("ServingExcludes")
  /\ version' = version + 1 /\ loading' = TRUE /\ taken' = 0
  /\ answers' = IF Follows("AnswerLast") THEN answers ELSE [answers EXCEPT ![version + 1] = "APPLIED"]
  /\ UNCHANGED <<content, served, closed, reading>>

Take ==
  /\ loading /\ taken < 2
  /\ taken' = taken + 1
  /\ UNCHANGED <<content, served, version, loading, answers, closed, reading>>

\* It writes what it has taken, in any order, at once or later.
Write(i) ==
  /\ loading /\ i <= taken /\ content[i] # version
  /\ content' = [content EXCEPT ![i] = version]
  /\ UNCHANGED <<served, version, loading, taken, answers, closed, reading>>

Begun == \E i \in Tensors : content[i] = version
Answer(kind) == answers' = [answers EXCEPT ![version] = kind]

\* AckProtocol.tla: Applied, Refused and Broken.
Apply == Answer("APPLIED") /\ served' = version /\ UNCHANGED closed
Refuse == (IF Follows("RefusalIsAnswered") THEN Answer("REFUSED") ELSE UNCHANGED answers) /\ UNCHANGED <<served, closed>>
Break == Answer("BROKEN") /\ closed' = TRUE /\ UNCHANGED served

Return ==
  /\ loading
  /\ Follows("WritesAll") => \A i \in Tensors : i <= taken => content[i] = version
  /\ CASE taken = 2 \/ ~Follows("AllTaken") -> Apply
       [] taken = 1 /\ Follows("PartIsBroken") -> Break
       [] OTHER -> Refuse
  /\ loading' = ~Follows("EndsOnce")
  /\ UNCHANGED <<content, version, taken, reading>>

\* Any exception but PartlyLoadedError.
Raise ==
  /\ loading
  /\ Follows("PartIsReported") => ~Begun
  /\ Refuse /\ loading' = ~Follows("EndsOnce")
  /\ UNCHANGED <<content, version, taken, reading>>

\* PartlyLoadedError, or an interrupt.
RaiseBegun ==
  /\ loading
  /\ Break /\ loading' = ~Follows("EndsOnce")
  /\ UNCHANGED <<content, version, taken, reading>>

-----------------------------------------------------------------------------
(* Forwards inside receiver.serving() *)

Launch ==
  /\ ~closed \/ ~Follows("BrokenIsTheEnd")
  /\ reading = NoRead
  /\ ~loading \/ ~Follows("ServingExcludes")
  /\ reading' = [of |-> served, seen |-> <<>>]
  /\ UNCHANGED <<content, served, version, loading, taken, answers, closed>>

Read ==
  /\ reading.of # -1 /\ Len(reading.seen) < 2
  /\ reading' = [reading EXCEPT !.seen = Append(@, content[Len(@) + 1])]
  /\ UNCHANGED <<content, served, version, loading, taken, answers, closed>>

Finish ==
  /\ Len(reading.seen) = 2
  /\ reading' = NoRead
  /\ UNCHANGED <<content, served, version, loading, taken, answers, closed>>

Next == Begin \/ Take \/ (\E i \in Tensors : Write(i)) \/ Return \/ Raise \/ RaiseBegun \/ Launch \/ Read \/ Finish

\* The loader ends, and so does a forward.
Fair == WF_vars(Take) /\ WF_vars(\E i \in Tensors : Write(i)) /\ WF_vars(Return) /\ WF_vars(Read) /\ WF_vars(Finish)
Spec == Init /\ [][Next]_vars /\ Fair

-----------------------------------------------------------------------------
(* What holds *)

\* G2: the engine holds the version that was acked last, until another is loaded.
AckedMeansServed ==
  /\ \A v \in Versions : answers[v] = "APPLIED" /\ version = v /\ ~closed => content = <<v, v>>
  /\ ~loading /\ ~closed => content = <<served, served>>

\* G6: a refusal changes nothing.
RefusalKeepsServing ==
  [][\A v \in Versions : answers'[v] = "REFUSED" /\ answers[v] # "REFUSED" =>
       served' = served /\ content' = <<served, served>>]_vars

\* G3: a forward sees one version, that which was served when it began.
NoTornRead == Len(reading.seen) = 2 => reading.seen = <<reading.of, reading.of>>

\* What is broken serves nothing more.
BrokenServesNothing == [][closed => reading' = NoRead \/ reading # NoRead]_vars

\* G1: a version is answered once, and the answer is not taken back.
AnswersStand == [][\A v \in Versions : answers[v] # "NONE" => answers'[v] = answers[v]]_vars

\* Every version that arrived is answered, and its load ends.
EveryLoadEnds ==
  /\ \A v \in Versions : version = v ~> answers[v] # "NONE"
  /\ loading ~> ~loading

-----------------------------------------------------------------------------
(* Canaries *)

\* A loader begins to write before it has taken all.
NothingIsWrittenEarly == loading /\ taken = 1 => content[1] # version

\* A version is loaded after one that was refused.
RefusedIsTheEnd == \A v \in Versions : v > 1 /\ answers[v] = "APPLIED" => answers[v - 1] # "REFUSED"
=============================================================================
