------------------------------ MODULE MCAssume ------------------------------
\* TLC must say no to this, with exit status 10.
EXTENDS AckProtocol
ASSUME Senders = {}
=============================================================================
