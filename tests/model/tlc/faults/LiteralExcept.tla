--------------------------- MODULE LiteralExcept ---------------------------
(* TLC 2.18 evaluates Tail of a function literal with EXCEPT without the EXCEPT. x is 1, Zero is violated, and
   TLC finds no error. Our lint refuses such text. *)
EXTENDS Naturals, Sequences
VARIABLE x

Init == x = Tail([[i \in 1..4 |-> 0] EXCEPT ![2] = 1])[1]
Next == UNCHANGED x
Zero == x = 0
=============================================================================
