------------------------------- MODULE Viewed -------------------------------
(* `hidden` may become 2 forever, so Ends is violated. Under a VIEW that leaves it out TLC 2.18 finds no error
   (tlaplus#59). Our lint refuses temporal properties under VIEW. *)
EXTENDS Naturals
VARIABLES x, hidden

Init == x = 0 /\ hidden = 0
Next == x = 0 /\ x' = 1 /\ hidden' \in {1, 2}
Spec == Init /\ [][Next]_<<x, hidden>> /\ WF_<<x, hidden>>(Next)
Seen == x
Ends == <>(hidden = 1)
=============================================================================
