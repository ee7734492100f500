------------------------------ MODULE Counter ------------------------------
(* A counter that counts to Max and is then done: the small model that the checker's own tests run. *)
EXTENDS Naturals
CONSTANT Max
VARIABLES n, done
vars == <<n, done>>

ASSUME Max > 0

Init == n = 0 /\ done = FALSE

Up ==
  /\ n < Max
  /\ ~done
  /\ n' = n + 1
  /\ UNCHANGED done

Finish ==
  /\ n = Max
  /\ done' = TRUE
  /\ UNCHANGED n

Reset ==
  /\ n > Max                   \* never
  /\ n' = 0
  /\ UNCHANGED done

Next == Up \/ Finish \/ Reset
Stops == Up \/ (Finish /\ ~done)

Fair == WF_vars(Up) /\ WF_vars(Finish)
Spec == Init /\ [][Next]_vars /\ Fair
Unfair == Init /\ [][Next]_vars
Stuck == Init /\ [][Stops]_vars

TypeOK == n \in 0..Max /\ done \in BOOLEAN
Small == n < 2
Never == n < 0
Rises == [][n' > n]_n
Falls == [][n' < n]_n
BothWays == TypeOK /\ [][n' < n]_n
Ends == <>done
Settles == <>[](n = Max)

Abstract == INSTANCE Promise WITH kept <- done
Refines == Abstract!Spec
Hasty == INSTANCE Promise WITH kept <- (n > 0 /\ ~done)
Overpromises == Hasty!Spec
=============================================================================
