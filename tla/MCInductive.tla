---------------------------- MODULE MCInductive -----------------------------
\* The module TLC runs for Inductive.
EXTENDS Inductive, TLC

\* IndInit leaves nothing of IndInv out: what a step comes to, with as few messages, was there from the start.
NothingWasLeftOut == FewInFlight => TLCGet("level") <= 1
=============================================================================
