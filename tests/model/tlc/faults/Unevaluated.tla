---------------------------- MODULE Unevaluated ----------------------------
(* Ends cannot be evaluated in the initial state. TLC 2.18 says so, explores nothing, and exits with 0
   (tlaplus#1440). An error among its messages, or no end of the search, is no verdict for us. *)
EXTENDS Naturals, Sequences
VARIABLE n

Init == n = 0
Next == n < 2 /\ n' = n + 1
Spec == Init /\ [][Next]_n /\ WF_n(Next)
Ends == <>(Head(<<>>) = n)
=============================================================================
