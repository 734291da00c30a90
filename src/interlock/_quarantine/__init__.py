"""Finds out whether a server may have forgotten a lease, and searches for a proof that no lease was lost.

The server decides: `primitives/quarantine.lua` compares what this client says with the record of the lock.

identity       which server answers;  stamp: that as text, for the scripts
server_history which servers answered at one address before;  server_histories: those of one Interlock
member_history the same for a server of a quorum, which judges itself;  voter: what such a server stores for that
slot_moves     how a slot of a cluster came to its node, and what moved with it
proofs         one search for all callers;  lossless: what counts as a proof
primacy        is this server still the primary?
"""
