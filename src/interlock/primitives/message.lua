-- A message, as every script of a synchronizer reads it: the codes of its reply, the identity stamp, and the first keys
-- and arguments. Every such script includes this file at its head. The file makes no function, because Lua would make
-- the function anew in each call.

-- Wire format (ADR 10). Records, waiters' entries, shares and notes are texts of words with one space between two
-- words. The words that a header names keep their places for ever. A later version may add words after the named words,
-- but before the free text, which stands last and begins with " !". A script passes over words that it does not know,
-- and keeps them when it changes a text. Only a text that begins anew (for another grant or another generation) begins
-- without them. A change that older versions must not ignore raises the number at the start of the record: a script
-- refuses every number but its own.

-- Reply codes. primitives/codes.py has the same names and numbers.
local GRANTED, QUEUED, BUSY, RETRY, NOT_FOUND, REVOKED, NO_EXPIRY, WRONG_KIND, LIMIT_MISMATCH, CROWDED, ABSTAINS =
  1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12
-- The identity stamp: the last argument of every message. The client's connection appends the stamp, whose text
-- _quarantine/stamp.py makes, so no table of verbs lists it. Its layout, by bytes:
--
--   1 .. 25   identity   of this server: "<12 characters of run_id>:<12 characters of master_replid>"
--   26        mark       " "; "+": this server is one of a quorum; "*": it is the primary again, after another server
--   27 ..     history    "<since> <wait> <grace> <previous>[ <lossless>...]", which only decide_quarantine() reads;
--                        with the mark "+": " <max_ttl, ms>" of this client, which only judge_voter() reads
--
--   since      on this server's clock, ms: this identity began no later than then
--   wait       ms: the longest ttl that a lease granted under an earlier identity may have, by this client's max_ttl
--   grace      ms after `since` in which an old primary may have granted and renewed such leases
--   previous   the identity that the client knew before this one; "-": none; "?": there may have been one;
--              "@<...>", with the mark "*": the server in between; "@@<...>": the one beside which this server,
--              its spare, may have run
--   lossless   "<beginning of an identity>[/<least ttl, ms>]": this server has every lease of that identity, or every
--              such lease whose ttl is at least that long
--
-- The stamp "" comes from a client that has no quarantine, and "+" from such a client of a quorum. In a quorum one key
-- more stands behind the keys that a header names: VOTER, of the voter record (voter.lua).
local STAMP = ARGV[#ARGV]
ARGV[#ARGV] = nil
local MARK_AT, PLUS, STAR, AT_SIGN = 26, 43, 42, 64  -- the place of the mark, and the bytes of "+", "*" and "@"
local IDENTITY = #STAMP < MARK_AT and '-' or string.sub(STAMP, 1, MARK_AT - 1)
local MARK = string.byte(STAMP, MARK_AT)
local IN_QUORUM, HAS_RETURNED = STAMP == '+' or MARK == PLUS, MARK == STAR
local VOTER = IN_QUORUM and table.remove(KEYS)
-- RECORD_TTL_MS: how long a record outlives its last lease. QUEUE_TTL_MS: how long the queue outlives its last
-- heartbeat. LIVENESS_MS: how long a waiter counts as alive after a heartbeat. MAX_PER_CALL: how many holders, waiters
-- or parties one script call drops, grants to or wakes, so that no call blocks the server for long. VOTER_TTL_MS: how
-- long the voter record lives. A call that finds less than MIN_VOTER_TTL_MS left renews it.
local RECORD_TTL_MS, QUEUE_TTL_MS, LIVENESS_MS, MAX_PER_CALL = 300000, 10000, 3000, 32
local VOTER_TTL_MS, MIN_VOTER_TTL_MS = 90 * 86400000, 60 * 86400000
local RECORD, QUEUE, WAITERS, TOMBSTONES = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
-- Stands in place of a pttl: the queue has more dead waiters than one script call drops, so the client must ask again
-- at once.
local MORE_DEAD_WAITERS = -3
local call, verb, token = redis.call, ARGV[1], ARGV[2]

