----------------------------- MODULE Continued -----------------------------
(* Small is violated. With -continue TLC 2.18 says so, goes on, says "No error has been found" and exits with 0
   (tlaplus#1385). We never use -continue. *)
EXTENDS Naturals
VARIABLE n

Init == n = 0
Next == n < 3 /\ n' = n + 1
Small == n # 2
=============================================================================
