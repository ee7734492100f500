------------------------------ MODULE Kernels ------------------------------
(***************************************************************************)
(* Slots on a device: reads and writes that outlast the call that launched *)
(* them.  weightsync/weights/device, engine/packer.py and the swap in     *)
(* weights/target.py.                                                      *)
(*                                                                         *)
(* The trainer copies its weights into a slot with a kernel, and a worker  *)
(* reads what it serves with kernels of its own, tensor by tensor.  The    *)
(* host does not wait for them: it sends, swaps and acks. In Slots.tla a   *)
(* forward ends with its call, so a swap excludes it. Here only the hosts' *)
(* waits order kernels.                                                    *)
(*                                                                         *)
(* Abstracted: one send at a time, to all workers that are not lost; two   *)
(* tensors; one kernel of each kind at a time, the hardest to wait for;    *)
(* messages in order, as AckProtocol.tla and Slots.tla have them.  A       *)
(* worker that dies takes its kernels with it.                             *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, Sequences

CONSTANTS
  Workers,
  Slots,       \* 1..n
  MaxVersion,
  Mapped,      \* workers read the slot itself; otherwise they copy it into parameters of their own
  Losses,      \* a link may be lost while its worker lives, and a worker may die
  Careless     \* rules that are removed for the revert tests; {} otherwise

AllRules == {
  "CopyEndsFirst",     \* an update leaves once the kernel that writes its slot has ended
  "SnapshotFirst",     \* the trainer's weights change once that kernel has read them
  "ReadsEndFirst",     \* a worker swaps, and so acks, once its kernels have ended
  "SwapEndsFirst",     \* it launches the next forward once what it copied out is whole
  "OlderStayPinned",   \* a version stays pinned when a newer one is sent, until that is acked
  "LostAreRetired"     \* the slots of a worker that is lost, and lives, are never written again
}
ASSUME Careless \subseteq AllRules
ASSUME Mapped \in BOOLEAN /\ Losses \in BOOLEAN

VARIABLES
  weights,    \* what the trainer's optimizer has written last
  version,    \* the newest version begun
  put,        \* put[v]: the weights that version v is to have
  sending,    \* the slot of the version that the trainer is about to send; 0: none
  copying,    \* the kernel that writes it: <<slot, tensors written>>; Idle: it has ended
  content,    \* content[i]: the weights in each tensor of slot i
  place,      \* place[v]: the slot of version v
  messages,    \* <<w, v>>: updates and acks on their way
  acks,
  owed,       \* workers that have not acked the newest version
  pins,       \* <<w, v>>: versions that the worker may read, as the trainer knows
  retired,    \* slots that are never written again
  lost,       \* workers whose link is lost, or that are dead
  served,     \* served[w]: the version; 0: none
  own,        \* own[w]: its own parameters, where it copies out
  filling,    \* the kernel that copies out: <<version, tensors>>
  reading     \* the kernel of a forward: [v, seen]

trainer == <<weights, version, put, sending, copying, content, place, owed, pins, retired>>
workers == <<served, own, filling, reading>>
vars == <<trainer, messages, acks, lost, workers>>

Idle == <<0, 0>>
NoRead == [v |-> 0, seen |-> <<>>]
Versions == 1..MaxVersion
Follows(rule) == rule \notin Careless

Init ==
  /\ weights = 1 /\ version = 0 /\ sending = 0 /\ copying = Idle
  /\ put = [v \in Versions |-> 0] /\ place = [v \in Versions |-> 0]
  /\ content = [i \in Slots |-> <<0, 0>>]
  /\ messages = {} /\ acks = {} /\ owed = {} /\ pins = {} /\ retired = {} /\ lost = {}
  /\ served = [w \in Workers |-> 0] /\ own = [w \in Workers |-> <<0, 0>>]
  /\ filling = [w \in Workers |-> Idle] /\ reading = [w \in Workers |-> NoRead]

-----------------------------------------------------------------------------
(* The trainer *)

Free == Slots \ (retired \cup {place[pin[2]] : pin \in pins})
Ready == sending = 0 /\ owed = {}

\* A kernel of the optimizer, in order with the trainer's stream.
Train ==
  /\ weights <= MaxVersion
  /\ copying = Idle \/ ~Follows("SnapshotFirst")
  /\ weights' = weights + 1
  /\ UNCHANGED <<owed, version, put, sending, copying, content, place, pins, retired, messages, acks, lost, workers>>

\* The lowest slot that is free: the one used before.
Begin ==
  /\ Ready /\ version < MaxVersion /\ copying = Idle /\ Free # {}
  /\ LET slot == CHOOSE i \in Free : \A j \in Free : i <= j IN
       /\ version' = version + 1
       /\ put' = [put EXCEPT ![version + 1] = weights]
       /\ place' = [place EXCEPT ![version + 1] = slot]
       /\ sending' = slot /\ copying' = <<slot, 0>>
  /\ UNCHANGED <<weights, content, owed, pins, retired, messages, acks, lost, workers>>

CopyTensor ==
  LET slot == copying[1] tensor == copying[2] + 1 IN
  /\ copying # Idle
  /\ content' = [content EXCEPT ![slot][tensor] = weights]
  /\ copying' = IF tensor = 2 THEN Idle ELSE <<slot, tensor>>
  /\ UNCHANGED <<weights, version, put, sending, place, owed, pins, retired, messages, acks, lost, workers>>

Dispatch ==
  /\ sending # 0
  /\ copying = Idle \/ ~Follows("CopyEndsFirst")
  /\ sending' = 0
  /\ messages' = messages \cup {<<w, version>> : w \in Workers \ lost}
  /\ pins' = (IF Follows("OlderStayPinned") THEN pins ELSE {}) \cup {<<w, version>> : w \in Workers \ lost}
  /\ owed' = Workers \ lost
  /\ UNCHANGED <<weights, version, put, copying, content, place, retired, acks, lost, workers>>

Hear(w, v) ==
  /\ <<w, v>> \in acks
  /\ acks' = acks \ {<<w, v>>}
  /\ pins' = {pin \in pins : ~(pin[1] = w /\ pin[2] < v)}
  /\ owed' = owed \ {w}
  /\ UNCHANGED <<weights, version, put, sending, copying, content, place, retired, messages, lost, workers>>

\* Its messages are gone with the link.
LetGo(w) ==
  /\ Losses /\ w \notin lost
  /\ lost' = lost \cup {w}
  /\ messages' = {m \in messages : m[1] # w} /\ acks' = {m \in acks : m[1] # w}
  /\ pins' = {pin \in pins : pin[1] # w}
  /\ owed' = owed \ {w}

Lose(w) ==
  /\ LetGo(w)
  /\ retired' = IF Follows("LostAreRetired") THEN retired \cup {place[pin[2]] : pin \in {p \in pins : p[1] = w}} ELSE retired
  /\ UNCHANGED <<weights, version, put, sending, copying, content, place, workers>>

Crash(w) ==
  /\ LetGo(w)
  /\ served' = [served EXCEPT ![w] = 0] /\ reading' = [reading EXCEPT ![w] = NoRead]
  /\ filling' = [filling EXCEPT ![w] = Idle]
  /\ UNCHANGED <<weights, version, put, sending, copying, content, place, retired, own>>

-----------------------------------------------------------------------------
(* A worker *)

\* Between two forwards of the host; kernels of the last may still run.
Swap(w, v) ==
  /\ <<w, v>> \in messages
  /\ reading[w] = NoRead \/ ~Follows("ReadsEndFirst")
  /\ messages' = messages \ {<<w, v>>}
  /\ served' = [served EXCEPT ![w] = v]
  /\ filling' = IF Mapped THEN filling ELSE [filling EXCEPT ![w] = <<v, 0>>]
  /\ acks' = IF Mapped \/ ~Follows("SwapEndsFirst") THEN acks \cup {<<w, v>>} ELSE acks
  /\ UNCHANGED <<trainer, lost, own, reading>>

FillTensor(w) ==
  LET v == filling[w][1] tensor == filling[w][2] + 1 IN
  /\ filling[w] # Idle
  /\ own' = [own EXCEPT ![w][tensor] = content[place[v]][tensor]]
  /\ filling' = [filling EXCEPT ![w] = IF tensor = 2 THEN Idle ELSE <<v, tensor>>]
  /\ acks' = IF tensor = 2 /\ Follows("SwapEndsFirst") /\ w \notin lost THEN acks \cup {<<w, v>>} ELSE acks
  /\ UNCHANGED <<trainer, messages, lost, served, reading>>

Launch(w) ==
  /\ served[w] # 0 /\ reading[w] = NoRead
  /\ filling[w] = Idle \/ ~Follows("SwapEndsFirst")
  /\ reading' = [reading EXCEPT ![w] = [v |-> served[w], seen |-> <<>>]]
  /\ UNCHANGED <<trainer, messages, acks, lost, served, own, filling>>

ReadTensor(w) ==
  LET tensor == Len(reading[w].seen) + 1
      found == IF Mapped THEN content[place[reading[w].v]][tensor] ELSE own[w][tensor] IN
  /\ reading[w].v # 0 /\ tensor <= 2
  /\ reading' = [reading EXCEPT ![w].seen = Append(@, found)]
  /\ UNCHANGED <<trainer, messages, acks, lost, served, own, filling>>

EndKernel(w) ==
  /\ Len(reading[w].seen) = 2
  /\ reading' = [reading EXCEPT ![w] = NoRead]
  /\ UNCHANGED <<trainer, messages, acks, lost, served, own, filling>>

-----------------------------------------------------------------------------

Next ==
  \/ Train \/ Begin \/ CopyTensor \/ Dispatch
  \/ \E w \in Workers, v \in Versions : Hear(w, v)
  \/ \E w \in Workers : Lose(w)
  \/ \E w \in Workers : Crash(w)
  \/ \E w \in Workers, v \in Versions : Swap(w, v)
  \/ \E w \in Workers : FillTensor(w)
  \/ \E w \in Workers : Launch(w)
  \/ \E w \in Workers : ReadTensor(w)
  \/ \E w \in Workers : EndKernel(w)

\* Kernels end, and hosts make progress. Forwards need not be launched.
Progress ==
  /\ WF_vars(CopyTensor) /\ WF_vars(Dispatch)
  /\ \A w \in Workers :
       /\ WF_vars(\E v \in Versions : Hear(w, v))
       /\ WF_vars(FillTensor(w)) /\ WF_vars(ReadTensor(w)) /\ WF_vars(EndKernel(w))

\* A swap gets its turn between two forwards, however many are launched. This is assumed: in the code, forwards give way
\* to a swap that waits (engine/serving_lock.py).
Spec == Init /\ [][Next]_vars /\ Progress /\ \A w \in Workers : SF_vars(\E v \in Versions : Swap(w, v))

\* Without that assumption, forwards that follow one another without a pause keep the swap out forever.
WithoutTurns == Init /\ [][Next]_vars /\ Progress /\ \A w \in Workers : WF_vars(\E v \in Versions : Swap(w, v))

-----------------------------------------------------------------------------
(* What holds *)

\* G3 of kernels: what a forward reads is one version, that which was served when it was launched.
NoTornKernel ==
  \A w \in Workers : LET seen == reading[w].seen IN Len(seen) = 2 => seen[1] = put[reading[w].v] /\ seen[2] = seen[1]

\* No slot that a kernel reads, or may yet read, changes.
MayBeRead(w) ==
  {place[v] : v \in {m[2] : m \in {n \in messages : n[1] = w}} \cup ({filling[w][1]} \ {0})
                    \cup (IF Mapped THEN {served[w], reading[w].v} \ {0} ELSE {})}
NeverRewritten ==
  [][\A i \in Slots : content'[i] # content[i] => \A w \in Workers : i \notin MayBeRead(w)]_vars

\* Two slots are enough while no worker is lost.
SlotIsFree == ~Losses /\ Ready /\ version < MaxVersion => Free # {}

\* The waits for kernels cannot block a send forever, if a swap gets its turn.
EverySendEnds == version \in Versions ~> Ready

-----------------------------------------------------------------------------
(* Canaries *)

\* An update arrives while a kernel reads the served version.
NothingArrivesAmidAKernel == \A w \in Workers : reading[w].v # 0 => \A m \in messages : m[1] # w

\* A slot is written again.
EachSlotOnce == [][\A i \in Slots : content'[i] # content[i] => content[i][2] = 0]_vars
=============================================================================
