----------------------------- MODULE TwoWorkers -----------------------------
(* With two workers TLC 2.18 may miss a violated temporal property: one of them may add TRUE's successors to the
   behaviour graph before the other adds FALSE's. With one worker it never does. Our lint asks for one. *)
VARIABLE lit

Init == lit = FALSE
Next == lit' \in BOOLEAN
Spec == Init /\ [][Next]_lit
LitOnce == [](lit => [](~lit => []~lit))
=============================================================================
