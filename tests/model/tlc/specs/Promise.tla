------------------------------ MODULE Promise ------------------------------
(* What a user of Counter reads: it is kept once, and then for good. *)
VARIABLE kept

Keep == kept = FALSE /\ kept' = TRUE
Spec == kept = FALSE /\ [][Keep]_kept
=============================================================================
