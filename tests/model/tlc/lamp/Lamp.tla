--------------------------------- MODULE Lamp ---------------------------------
\* A lamp that can be switched Most times: small enough to hunt all of its mutants in a test.
EXTENDS Naturals, TLC
CONSTANT Most
VARIABLES on, count
vars == <<on, count>>

Switch ==
  /\ count < Most
  /\ on' = ~on
  /\ count' = IF TRUE THEN count + 1 ELSE count

Init == on = FALSE /\ count = 0
Next == \/ Switch
Spec == Init /\ [][Next]_vars

TypeOK == count \in 0..Most
Switches == [][on' # on]_vars
Counts == [][count' = count + 1]_vars

ASSUME TLCSet(1, FALSE)
LookOut == TLCGet(1) \/ (on => TLCSet(1, TRUE) /\ PrintT(<<"MET", "lit">>))
=============================================================================
