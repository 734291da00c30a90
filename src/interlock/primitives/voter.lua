-- Whether this server of a quorum counts now (ADR 60). lock.lua includes this file, behind queue.lua, whose clock it
-- reads.
--
-- Theory. A server that has forgotten a lease must not help another client to a majority while that lease may be alive.
-- Clients can't know what a server has forgotten: each client has seen another part of its past. So the server keeps
-- the evidence beside the leases, and loses it with them: the voter record says under which replid it serves, and
-- since when. Each loss of data either removes this record or changes the replid: a restart and a promotion make a new
-- one, and a server that follows another, even for a moment, has that of the other one.
--
--   voter record   string  "1 <master_replid> <since, ms> <longest max_ttl, ms>"
--                          since: when a client first reached this server under this replid, by the server's clock;
--                          longest max_ttl: of all clients since then
--
-- Rules.
-- (a) No record, or one of another replid: the server writes the record, and abstains from now on for the longest
--     max_ttl.
-- (b) A server that abstains grants nothing, hands nothing over, confirms no renewal and accepts no fence. It still
--     lengthens a key that it has, and that key still blocks others.
-- (c) The script reads the replid from INFO in each call. The stamp is older: REPLICAOF closes no connection.
-- (d) The record is written before the vote. If that fails, there is no vote.
-- (e) The record stores when the abstention began, and never when it ends: a client with a longer max_ttl waits longer.
--
-- Such a server does not decide by decide_quarantine(), and its stamp has max_ttl in place of a history.

-- How long this server abstains, ms: 0 if it counts; the evidence for a marker and for records; and the abstention: the
-- words that tell it from each other one. judge_voter() sets them. `voter_error`: why the server can't judge.
local abstains_ms, abstention_evidence, abstention, voter_error = 0, nil, nil, nil

-- Judges whether this server counts, and writes the voter record unless `is_query`. Returns the error or nil.
local function judge_voter(is_query)
  if #STAMP < MARK_AT then return end  -- this client has no quarantine
  local info, stored = redis.pcall('INFO', 'replication'), redis.pcall('GET', VOTER)
  local role, replid = string.match(type(info) == 'string' and info or '', 'role:(%a+).-\nmaster_replid:(%x+)')
  local known_replid, since, longest, tail =
    string.match(type(stored) == 'string' and stored or '', '^1 (%x+) (%d+) (%d+)(.*)$')
  if role == 'slave' then
    voter_error = redis.error_reply("READONLY You can't write against a read only replica.")
  elseif not role then
    voter_error = redis.error_reply('ERR interlock: voter: INFO replication says nothing of its role')
  elseif stored and not known_replid then
    voter_error = redis.error_reply('ERR interlock: voter: the key ' .. VOTER .. ' has another type or version')
  end
  if voter_error then return voter_error end
  local now_ms, max_ttl = math.floor(get_time_us() / 1000), tonumber(string.sub(STAMP, MARK_AT + 2))
  local is_same = known_replid == replid and tonumber(since) <= now_ms  -- else the clock was set back: begin anew
  since, tail = is_same and tonumber(since) or now_ms, is_same and tail or ''
  local is_kept = is_same and tonumber(longest) >= max_ttl
  longest = math.max(tonumber(longest or 0), max_ttl)
  if is_kept then  -- PEXPIRE needs no memory: a full server goes on to count
    if not is_query and call('PTTL', VOTER) < MIN_VOTER_TTL_MS then call('PEXPIRE', VOTER, VOTER_TTL_MS) end
  elseif not is_query then
    local record = string.format('1 %s %.0f %.0f%s', replid, since, longest, tail)
    local written = redis.pcall('SET', VOTER, record, 'PX', VOTER_TTL_MS)
    if written.err then
      voter_error = written
      return written
    end
  end
  IDENTITY = string.sub(STAMP, 1, 13) .. string.sub(replid, 1, 12)
  abstains_ms = math.max(0, since + longest - now_ms)
  if abstains_ms > 0 then
    abstention = string.format('%s %.0f', replid, since)
    -- "@": an earlier version of interlock then takes this `since` and this wait, and not its own.
    abstention_evidence = string.format('@?>%s>%.0f+%.0f', IDENTITY, since, longest)
  end
end
