---------------------------- MODULE MCInductive -----------------------------
\* The module TLC runs for Inductive.
EXTENDS Inductive, TLC

\* IndInit has every state of IndInv with so few messages: no step leads to another one.
NothingWasLeftOut == FewInFlight => TLCGet("level") <= 1
=============================================================================
