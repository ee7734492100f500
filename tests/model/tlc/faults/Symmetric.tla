----------------------------- MODULE Symmetric -----------------------------
(* x may become b forever, so Ends is violated. Under SYMMETRY TLC 2.18 takes b for a and finds no error
   (tlaplus#59). Our lint refuses temporal properties under SYMMETRY. *)
EXTENDS TLC
CONSTANTS a, b, none
VARIABLE x

Init == x = none
Next == x = none /\ x' \in {a, b}
Spec == Init /\ [][Next]_x /\ WF_x(Next)
Swapped == Permutations({a, b})
Ends == <>(x = a)
=============================================================================
