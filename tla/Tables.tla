------------------------------ MODULE Tables ------------------------------
\* Generated from spec/protocol.toml by spec/generate.py. Do not edit.
\* In AckProtocol.tla control state moves only through these rows.

ProtocolVersion == 4
Initial == "uninitialized"
Final == "closed"

\* The states of both roles.
States == {
  "uninitialized",
  "ready",
  "pending_async",
  "awaiting_ack",
  "closed"
}

\* The inputs of a sender.
SenderInputs == {
  "CONNECT",
  "ARRIVED",
  "SEND",
  "SEND_ASYNC",
  "WAIT",
  "WAIT_SETTLED",
  "REPLY",
  "LOST",
  "SETTLED",
  "DEADLINE",
  "INTERRUPTED",
  "ABANDON",
  "JOIN",
  "CAUGHT_UP",
  "LEFT",
  "REMOVE",
  "STALE",
  "CLOSE"
}

\* <<from, input, to>>
SenderRows == {
  <<"uninitialized", "CONNECT", "ready">>,
  <<"ready", "ARRIVED", "ready">>,
  <<"pending_async", "ARRIVED", "pending_async">>,
  <<"awaiting_ack", "ARRIVED", "awaiting_ack">>,
  <<"ready", "SEND", "awaiting_ack">>,
  <<"ready", "SEND_ASYNC", "pending_async">>,
  <<"pending_async", "WAIT", "awaiting_ack">>,
  <<"pending_async", "WAIT_SETTLED", "ready">>,
  <<"pending_async", "REPLY", "pending_async">>,
  <<"awaiting_ack", "REPLY", "awaiting_ack">>,
  <<"ready", "LOST", "ready">>,
  <<"pending_async", "LOST", "pending_async">>,
  <<"awaiting_ack", "LOST", "awaiting_ack">>,
  <<"awaiting_ack", "SETTLED", "ready">>,
  <<"awaiting_ack", "DEADLINE", "pending_async">>,
  <<"awaiting_ack", "INTERRUPTED", "pending_async">>,
  <<"pending_async", "ABANDON", "ready">>,
  <<"uninitialized", "JOIN", "uninitialized">>,
  <<"ready", "JOIN", "ready">>,
  <<"pending_async", "JOIN", "pending_async">>,
  <<"awaiting_ack", "JOIN", "awaiting_ack">>,
  <<"ready", "CAUGHT_UP", "ready">>,
  <<"pending_async", "CAUGHT_UP", "pending_async">>,
  <<"awaiting_ack", "CAUGHT_UP", "awaiting_ack">>,
  <<"ready", "LEFT", "ready">>,
  <<"pending_async", "LEFT", "pending_async">>,
  <<"awaiting_ack", "LEFT", "awaiting_ack">>,
  <<"uninitialized", "REMOVE", "uninitialized">>,
  <<"ready", "REMOVE", "ready">>,
  <<"pending_async", "REMOVE", "pending_async">>,
  <<"awaiting_ack", "REMOVE", "awaiting_ack">>,
  <<"ready", "STALE", "ready">>,
  <<"pending_async", "STALE", "pending_async">>,
  <<"awaiting_ack", "STALE", "awaiting_ack">>,
  <<"uninitialized", "CLOSE", "closed">>,
  <<"ready", "CLOSE", "closed">>,
  <<"pending_async", "CLOSE", "closed">>,
  <<"awaiting_ack", "CLOSE", "closed">>,
  <<"closed", "CLOSE", "closed">>
}

\* The inputs of a receiver.
ReceiverInputs == {
  "CONNECT",
  "REJECTED",
  "TAKEOVER",
  "UPDATE",
  "DUPLICATE",
  "STALE",
  "NEWER",
  "APPLIED",
  "DEFERRED",
  "SEND_ACK",
  "REFUSED",
  "BROKEN",
  "INVALIDATED",
  "ANSWERED",
  "LINK_DOWN",
  "CLOSE"
}

\* <<from, input, to>>
ReceiverRows == {
  <<"uninitialized", "CONNECT", "ready">>,
  <<"uninitialized", "REJECTED", "uninitialized">>,
  <<"ready", "REJECTED", "ready">>,
  <<"pending_async", "REJECTED", "pending_async">>,
  <<"awaiting_ack", "REJECTED", "awaiting_ack">>,
  <<"ready", "TAKEOVER", "ready">>,
  <<"pending_async", "TAKEOVER", "ready">>,
  <<"awaiting_ack", "TAKEOVER", "ready">>,
  <<"ready", "UPDATE", "pending_async">>,
  <<"ready", "DUPLICATE", "ready">>,
  <<"pending_async", "DUPLICATE", "pending_async">>,
  <<"ready", "STALE", "ready">>,
  <<"pending_async", "STALE", "pending_async">>,
  <<"pending_async", "NEWER", "pending_async">>,
  <<"pending_async", "APPLIED", "awaiting_ack">>,
  <<"pending_async", "DEFERRED", "awaiting_ack">>,
  <<"uninitialized", "SEND_ACK", "uninitialized">>,
  <<"ready", "SEND_ACK", "ready">>,
  <<"pending_async", "SEND_ACK", "pending_async">>,
  <<"awaiting_ack", "SEND_ACK", "awaiting_ack">>,
  <<"pending_async", "REFUSED", "awaiting_ack">>,
  <<"pending_async", "BROKEN", "closed">>,
  <<"uninitialized", "INVALIDATED", "uninitialized">>,
  <<"ready", "INVALIDATED", "ready">>,
  <<"pending_async", "INVALIDATED", "pending_async">>,
  <<"awaiting_ack", "INVALIDATED", "awaiting_ack">>,
  <<"closed", "INVALIDATED", "closed">>,
  <<"awaiting_ack", "ANSWERED", "ready">>,
  <<"uninitialized", "LINK_DOWN", "uninitialized">>,
  <<"ready", "LINK_DOWN", "uninitialized">>,
  <<"pending_async", "LINK_DOWN", "uninitialized">>,
  <<"awaiting_ack", "LINK_DOWN", "uninitialized">>,
  <<"uninitialized", "CLOSE", "closed">>,
  <<"ready", "CLOSE", "closed">>,
  <<"pending_async", "CLOSE", "closed">>,
  <<"awaiting_ack", "CLOSE", "closed">>,
  <<"closed", "CLOSE", "closed">>
}

\* The kinds of a refusal.
RefusalKinds == {
  "REFUSED",
  "SUPERSEDED",
  "STALE",
  "FENCED",
  "FAILED"
}

\* The deliveries that a transport may declare for its links.
Deliveries == {
  [name |-> "ORDERED", reorders |-> FALSE, duplicates |-> FALSE, loses |-> FALSE],
  [name |-> "REORDERED", reorders |-> TRUE, duplicates |-> FALSE, loses |-> FALSE],
  [name |-> "AT_LEAST_ONCE", reorders |-> TRUE, duplicates |-> TRUE, loses |-> FALSE],
  [name |-> "BEST_EFFORT", reorders |-> TRUE, duplicates |-> TRUE, loses |-> TRUE]
}

\* <<id, name>>
Guarantees == {
  <<"G1", "AckNamesItsVersion">>,
  <<"G2", "AckedMeansServed">>,
  <<"G3", "NoTornRead">>,
  <<"G4", "ServingIsMonotone">>,
  <<"G5", "OneOutstanding">>,
  <<"G6", "RefusalKeepsServing">>,
  <<"G7", "OnlyTargetsChange">>,
  <<"G8", "CopyOwesNothing">>,
  <<"G9", "ClosedIsFinal">>,
  <<"G10", "EverySendEnds">>,
  <<"G11", "OutcomesAreTrue">>,
  <<"G12", "LateJoinerCatchesUp">>
}

\* Is there a row, and where does it lead? SenderNext is defined only where SenderMay holds.
\* TLC makes the function once; it would search the rows at each call.
SenderLeads ==
  [key \in {<<row[1], row[2]>> : row \in SenderRows} |->
    (CHOOSE row \in SenderRows : <<row[1], row[2]>> = key)[3]]
SenderMay(s, i) == <<s, i>> \in DOMAIN SenderLeads
SenderNext(s, i) == SenderLeads[<<s, i>>]

\* Is there a row, and where does it lead? ReceiverNext is defined only where ReceiverMay holds.
\* TLC makes the function once; it would search the rows at each call.
ReceiverLeads ==
  [key \in {<<row[1], row[2]>> : row \in ReceiverRows} |->
    (CHOOSE row \in ReceiverRows : <<row[1], row[2]>> = key)[3]]
ReceiverMay(s, i) == <<s, i>> \in DOMAIN ReceiverLeads
ReceiverNext(s, i) == ReceiverLeads[<<s, i>>]

=============================================================================
