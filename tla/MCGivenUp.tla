----------------------------- MODULE MCGivenUp -----------------------------
(***************************************************************************)
(* AckProtocol where a sender gives up a link whose answers were cut.      *)
(*                                                                         *)
(* With "cut" and "wrong", AckProtocol allows answers to be cut while both *)
(* ends of their link are open: the sender is about to give the link up.   *)
(* It cannot state that the sender does so, since nothing records the cut. *)
(* Then a sender may keep the link, and wait forever for an answer that    *)
(* will not come.  This module records the cut, and makes giving the link  *)
(* up fair.                                                                *)
(*                                                                         *)
(* Its configurations have the feature "wrong" and not "cut": Cut takes    *)
(* the place of AckProtocol's own cuts.                                    *)
(***************************************************************************)
EXTENDS AckProtocol

VARIABLE cut   \* cut[s][w]: the newest link whose answers were cut while both its ends were open; 0: none

all == <<vars, cut>>

Cut(s, w, k, ps) ==
  /\ CutAnswers(s, w, k, ps)
  /\ cut' = IF gone[s][w] THEN cut ELSE [cut EXCEPT ![s][w] = k]

CutNext ==
  \/ Next /\ UNCHANGED cut
  \/ \E s \in Senders, w \in Workers, k \in Links, ps \in SUBSET (0..(MaxVersion + 1)) : Cut(s, w, k, ps)

GiveUpCut(s, w) == cut[s][w] = sdata[s].members[w].link /\ GiveUp(s, w) /\ UNCHANGED cut

\* A sender need not give up a link whose answers were cut.
KeptWorld == Init /\ cut = [s \in Senders |-> [w \in Workers |-> 0]] /\ [][CutNext]_all /\ FairWorld

GivenUpWorld == KeptWorld /\ \A s \in Senders, w \in Workers : WF_all(GiveUpCut(s, w))
=============================================================================
