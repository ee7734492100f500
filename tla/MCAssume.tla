------------------------------ MODULE MCAssume ------------------------------
\* TLC must find this false, with exit code 10.
EXTENDS AckProtocol
ASSUME Senders = {}
=============================================================================
