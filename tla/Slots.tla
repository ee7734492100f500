------------------------------- MODULE Slots -------------------------------
(***************************************************************************)
(* Payloads in shared memory: transports/buffers.py, and the packing of    *)
(* engine/packer.py.  Messages go over pipes (Pipe.tla); an update only    *)
(* names the slot that holds its weights.                                  *)
(*                                                                         *)
(* A trainer packs a slot tensor by tensor.  A worker serves the weights   *)
(* where they are, and its forward reads them tensor by tensor.  Only the  *)
(* worker's answers unpin a slot.  The slots of a lost worker are never    *)
(* packed again, unless its process is known to be dead.                   *)
(*                                                                         *)
(* Abstracted: two tensors; slots of one size; AckProtocol's own network   *)
(* in place of the pipe.  A worker that copies a payload out releases its  *)
(* slot sooner than this one.  A forward and a swap exclude each other: in *)
(* the code the serving lock does that.                                    *)
(***************************************************************************)
EXTENDS AckProtocol, Sequences

CONSTANTS
  Slots,      \* 1..n: the slots that a trainer may allocate
  Delivery,   \* what the adapters declare: a name of Deliveries
  Careless    \* rules of this module that are removed for the revert tests; {} otherwise

VARIABLES
  content,   \* content[s][i][t]: the serial whose tensor t is in slot i of trainer s; 0: none
  place,     \* place[s][n]: the slot that the updates with serial n name
  packing,   \* packing[s]: <<slot, tensors packed>>; slot 0: nothing is being packed
  pins,      \* [s, w, k, v, i]: link k offered worker w version v in slot i, and w may still read it
  acked,     \* acked[s][w]: the newest version acked over the link that is open
  retired,   \* retired[s]: slots that are never packed again
  dead,      \* <<s, w, k>>: links whose worker process has died
  seen       \* seen[w]: the tensors that a forward has read so far

memory == <<content, place, packing, pins, acked, retired, dead, seen>>
slotVars == <<vars, memory>>

SlotRules == {
  "AcksArePins",     \* a slot is packed only when no worker may still read it
  "LostAreRetired",  \* the slots of a lost worker are never packed again, unless it is known to be dead
  "NewerUnpins",     \* an ack unpins the versions below the one that it names, and not that version itself
  "OnlyTheRefused",  \* a refusal unpins the version that it names, and no other
  "JoinersPin",      \* what a joiner is sent is pinned like any update
  "DueIsKept"        \* a version that a joiner may still need is not packed over
}
ASSUME Careless \subseteq SlotRules
ASSUME \E d \in Deliveries : d.name = Delivery /\ d.reorders = Reorders /\ d.duplicates = Duplicates /\ d.loses = Loses
Follows(rule) == rule \notin Careless

Nothing == <<0, 0>>
LinkTo(s, w) == sdata[s].members[w].link
PinsOf(s, w) == {pin \in pins : pin.s = s /\ pin.w = w}

-----------------------------------------------------------------------------
(* The pool *)

\* Versions whose weights the sender keeps, for joiners and for the outstanding update.
Due(s) ==
  IF sstate[s] = Final \/ slife[s] # "alive" THEN {}
  ELSE {sdata[s].dueAll, sdata[s].out.version} \cup {sdata[s].members[w].due : w \in Workers}

Pinned(s) == {pin.i : pin \in {q \in pins : q.s = s}}
Kept(s) == {place[s][v] : v \in Due(s) \ {0}}
Free(s) == Slots \ (retired[s]
                    \cup (IF Follows("AcksArePins") THEN Pinned(s) ELSE {})
                    \cup (IF Follows("DueIsKept") THEN Kept(s) ELSE {}))

\* The lowest free slot, so a used one is packed again as soon as possible: the hardest case.
Acquire(s) ==
  /\ slife[s] = "alive" /\ sstate[s] = "ready" /\ packing[s] = Nothing /\ sdata[s].serial < MaxVersion /\ Free(s) # {}
  /\ packing' = [packing EXCEPT ![s] = <<CHOOSE i \in Free(s) : \A j \in Free(s) : i <= j, 0>>]
  /\ UNCHANGED <<vars, content, place, pins, acked, retired, dead, seen>>

Pack(s) ==
  LET slot == packing[s][1]
      tensor == packing[s][2] + 1 IN
  /\ slife[s] = "alive" /\ slot # 0 /\ tensor <= 2
  /\ content' = [content EXCEPT ![s][slot][tensor] = sdata[s].serial + 1]
  /\ packing' = [packing EXCEPT ![s] = <<slot, tensor>>]
  /\ UNCHANGED <<vars, place, pins, acked, retired, dead, seen>>

-----------------------------------------------------------------------------
(* The pins of a link *)

Shown(s, w, k, v, i) == [s |-> s, w |-> w, k |-> k, v |-> v, i |-> i]

\* The newest acked version after an ack of version v. An ack of a version never sent over the link is ignored.
Learnt(s, w, v) == IF \E pin \in PinsOf(s, w) : pin.k = LinkTo(s, w) /\ pin.v >= v THEN Max(acked[s][w], v) ELSE acked[s][w]
Over(s, w, v) == {pin \in PinsOf(s, w) : IF Follows("NewerUnpins") THEN pin.v < v ELSE pin.v <= v}

\* The sender's end of the link closes.
IsDead(s, w) == <<s, w, LinkTo(s, w)>> \in dead /\ sdata[s].members[w].link_state = "UP"
LetGo(s, ws) ==
  /\ pins' = {pin \in pins : ~(pin.s = s /\ pin.w \in ws)}
  /\ retired' = [retired EXCEPT ![s] = @ \cup
       (IF Follows("LostAreRetired") THEN {pin.i : pin \in {q \in pins : q.s = s /\ q.w \in ws /\ ~IsDead(s, q.w)}} ELSE {})]
  /\ acked' = [acked EXCEPT ![s] = [w \in Workers |-> IF w \in ws THEN 0 ELSE acked[s][w]]]

-----------------------------------------------------------------------------
(* The machines' steps over these slots *)

\* A sender sends what it has packed.
Send(s) ==
  /\ packing[s][2] = 2
  /\ \/ SendAll(s)
     \/ \E x \in If("async", {s}) : SendAsyncAll(x)
  /\ place' = [place EXCEPT ![s][sdata[s].serial + 1] = packing[s][1]]
  /\ packing' = [packing EXCEPT ![s] = Nothing]
  /\ pins' = pins \cup {Shown(s, w, LinkTo(s, w), sdata[s].version + 1, packing[s][1]) : w \in Owing(s)'}
  /\ UNCHANGED <<content, acked, retired, dead, seen>>

\* The version due to a joiner follows its Hello, in the slot that already holds it.
Lay(s, w) ==
  /\ Join(s, w)
  /\ pins' = IF Follows("JoinersPin")
             THEN pins \cup {Shown(s, w, m.k, m.v, place[s][m.p]) : m \in {n \in messages' \ messages : n.v # 0}}
             ELSE pins
  /\ UNCHANGED <<content, place, packing, acked, retired, dead, seen>>

Call(s) ==
  /\ \/ \E t \in Others : Copy(s, t)
     \/ \E c \in 1..MaxClock : Connect(s, c)
     \/ Wait(s)
     \/ \E x \in If("deadline", {s}) : Deadline(x)
     \/ \E x \in If("abandon", {s}) : Abandon(x)
     \/ \E w \in If("remove", Workers) : Remove(s, w)
  /\ UNCHANGED memory

LoseLink(s, w) ==
  /\ \/ Notice(s, w)
     \/ \E x \in If("wrong", {s}) : GiveUp(x, w)
     \/ \E k \in Links : AnswerBye(s, w, k)
     \/ \E k \in Links, kind \in Rejections : AnswerRejected(s, w, k, kind)
  /\ LetGo(s, IF sdata'[s].members[w].link_state \in {"LOST", "NONE"} THEN {w} ELSE {})
  /\ UNCHANGED <<content, place, packing, dead, seen>>

CloseAll(s) ==
  /\ \E x \in If("close", {s}) : CloseSender(x)
  /\ LetGo(s, Workers)
  /\ packing' = [packing EXCEPT ![s] = Nothing]
  /\ UNCHANGED <<content, place, dead, seen>>

\* The memory of a dead trainer stays as it is while a worker maps it.
DieAll(s) ==
  /\ \E x \in If("death", {s}) : Die(x)
  /\ pins' = {pin \in pins : pin.s # s}
  /\ packing' = [packing EXCEPT ![s] = Nothing]
  /\ UNCHANGED <<content, place, acked, retired, dead, seen>>

\* Answers that were not read are lost with the pipe that carried them.
Cut(s, w, k, ps) == CutAnswers(s, w, k, ps) /\ UNCHANGED memory

HearHello(s, w) ==
  /\ \E k \in Links : AnswerHello(s, w, k)
  /\ UNCHANGED memory

\* The link sees every answer that it carries, also those that its machine does not await.
HearAck(s, w, k, v) ==
  /\ AnswerAck(s, w, k, v)
  /\ IF Open(s, w, k)
     THEN /\ acked' = [acked EXCEPT ![s][w] = Learnt(s, w, v)]
          /\ pins' = pins \ Over(s, w, Learnt(s, w, v))
     ELSE UNCHANGED <<acked, pins>>
  /\ UNCHANGED <<content, place, packing, retired, dead, seen>>

HearRefusal(s, w, k, v) ==
  /\ \E kind \in Refusals : AnswerRefusal(s, w, k, v, kind)
  /\ pins' = IF Open(s, w, k) /\ acked[s][w] # v
             THEN {pin \in pins : ~(pin \in PinsOf(s, w) /\ (pin.v = v \/ ~Follows("OnlyTheRefused")))}
             ELSE pins
  /\ UNCHANGED <<content, place, packing, acked, retired, dead, seen>>

Read(w, s, k) ==
  /\ \/ HelloArrived(w, s, k)
     \/ \E x \in If("misfit", {w}) : Misfit(x, s, k)
     \/ \E v \in Versions : UpdateArrived(w, s, k, v)
     \/ LinkDown(w, s, k)
     \/ \E x \in If("fail", {w}) : LinkFailed(x, s, k)
  /\ UNCHANGED memory

\* A swap waits until the forward has ended.
Decide(w) ==
  /\ \/ seen[w] = <<>> /\ Applied(w)
     \/ \E x \in If("refuse", {w}) : Refused(x)
     \/ seen[w] = <<>> /\ \E x \in If("broken", {w}) : Broken(x)
     \/ Answered(w)
     \/ \E x \in If("bye", {w}) : CloseReceiver(x)
     \/ \E x \in If("fail", {w}) : FailReceiver(x)
  /\ UNCHANGED memory

Crash(w) ==
  /\ CrashReceiver(w)
  /\ dead' = dead \cup {<<s, w, LinkTo(s, w)>> : s \in {t \in Senders : Connected(t)}}
  /\ seen' = [seen EXCEPT ![w] = <<>>]
  /\ UNCHANGED <<content, place, packing, pins, acked, retired>>

-----------------------------------------------------------------------------
(* What is read *)

\* The sender of the weights with this key, and what is now in their slot.
Owner(key) == CHOOSE s \in Senders : sdata[s].incarnation = key[1]
Lies(s, n, tensor) == content[s][place[s][n]][tensor]
Half(key, tensor) == IF key = NoPayload THEN key ELSE <<key[1], key[2], Lies(Owner(key), key[3], tensor)>>

\* A forward reads one tensor. It continues when the link is lost or the receiver is closed.
ReadTensor(w) ==
  /\ rdata[w].served # NoPayload /\ Len(seen[w]) < 2
  /\ seen' = [seen EXCEPT ![w] = Append(@, Half(rdata[w].served, Len(seen[w]) + 1))]
  /\ UNCHANGED <<vars, content, place, packing, pins, acked, retired, dead>>

EndForward(w) ==
  /\ Len(seen[w]) = 2
  /\ seen' = [seen EXCEPT ![w] = <<>>]
  /\ UNCHANGED <<vars, content, place, packing, pins, acked, retired, dead>>

-----------------------------------------------------------------------------

SlotNext ==
  \/ \E s \in Senders : Acquire(s)
  \/ \E s \in Senders : Pack(s)
  \/ \E s \in Senders : Send(s)
  \/ \E s \in Senders, w \in Workers : Lay(s, w)
  \/ \E s \in Senders : Call(s)
  \/ \E s \in Senders, w \in Workers : LoseLink(s, w)
  \/ \E s \in If("close", Senders) : CloseAll(s)
  \/ \E s \in If("death", Senders) : DieAll(s)
  \/ \E s \in If("cut", Senders), w \in Workers, k \in Links, ps \in SUBSET (0..(MaxVersion + 1)) : Cut(s, w, k, ps)
  \/ \E s \in Senders, w \in Workers : HearHello(s, w)
  \/ \E s \in Senders, w \in Workers, k \in Links, v \in Versions : HearAck(s, w, k, v)
  \/ \E s \in Senders, w \in Workers, k \in Links, v \in Versions : HearRefusal(s, w, k, v)
  \/ \E w \in Workers, s \in Senders, k \in Links : Read(w, s, k)
  \/ \E w \in Workers : Decide(w)
  \/ \E w \in If("crash", Workers) : Crash(w)
  \/ \E w \in Workers : ReadTensor(w)
  \/ \E w \in Workers : EndForward(w)

SlotStart ==
  /\ Init
  /\ content = [s \in Senders |-> [i \in Slots |-> <<0, 0>>]]
  /\ place = [s \in Senders |-> [n \in 1..MaxVersion |-> 0]]
  /\ packing = [s \in Senders |-> Nothing]
  /\ pins = {} /\ dead = {}
  /\ acked = [s \in Senders |-> [w \in Workers |-> 0]]
  /\ retired = [s \in Senders |-> {}]
  /\ seen = [w \in Workers |-> <<>>]

Spec == SlotStart /\ [][SlotNext]_slotVars

-----------------------------------------------------------------------------
(* Properties *)

\* G3 for single tensors: a forward reads tensors of one version.
NoTornForward == \A w \in Workers : Len(seen[w]) = 2 => seen[w][1] = seen[w][2] /\ seen[w][1] = rdata[w].served

\* The slots of what a worker serves, has pending, or may still read from a link.
MayBeRead(s) ==
  LET keys == UNION {{rdata[w].served, rdata[w].pending} : w \in Workers} IN
  {place[s][key[3]] : key \in {x \in keys : x # NoPayload /\ x[1] = sdata[s].incarnation}}
  \cup {place[s][m.p] : m \in {n \in messages : n.s = s /\ n.v # 0}}
NeverRewritten ==
  [][\A s \in Senders, i \in Slots : content'[s][i] # content[s][i] => i \notin MayBeRead(s)]_slotVars

\* The pool does not run out: one slot for each link ever opened, one that is due, and one being packed.
SlotIsFree == \A s \in Senders :
  slife[s] = "alive" /\ sstate[s] = "ready" /\ packing[s] = Nothing /\ sdata[s].serial < MaxVersion => Free(s) # {}

\* The weights in flight, pending and served are those in the slots.
In(m) == IF m.v = 0 THEN m ELSE [m EXCEPT !.p = IF Lies(m.s, @, 1) = Lies(m.s, @, 2) THEN Lies(m.s, @, 1) ELSE 0]
Whole(key) == IF Half(key, 1) = Half(key, 2) THEN Half(key, 1) ELSE NoPayload
Ack == INSTANCE AckProtocol WITH
  messages <- {In(m) : m \in messages},
  rdata <- [w \in Workers |-> [rdata[w] EXCEPT !.pending = Whole(@), !.served = Whole(@),
                                               !.live = <<Half(rdata[w].served, 1), Half(rdata[w].served, 2)>>]]

RefinesAckProtocol == Ack!Refined

-----------------------------------------------------------------------------
(* Canaries: situations that TLC must reach, or the proof would hold vacuously *)

\* A slot is packed again.
EachSlotOnce == [][\A s \in Senders, i \in Slots : content'[s][i] # content[s][i] => content[s][i][2] = 0]_slotVars

\* A lost worker that is alive keeps reading its version while the trainer packs the next one.
LostReadNothing == [][\A w \in Workers, s \in Senders :
  ReadTensor(w) /\ packing[s] # Nothing /\ rdata[w].served # NoPayload => place[s][rdata[w].served[3]] \notin retired[s]]_slotVars

\* A slot whose worker is known to be dead is packed again.
TheDeadKeepTheirs == [][\A s \in Senders, w \in Workers :
  sdata'[s].members[w].link_state = "LOST" /\ pins' # pins => retired'[s] # retired[s]]_slotVars
=============================================================================
