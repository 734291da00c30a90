-- The quarantine: for how long this server grants nothing, because leases that it has lost may be alive; and which
-- fence is higher than the fences of the grants that it has lost. lock.lua and permits.lua include this file, behind
-- queue.lua, whose clock it reads.
--
-- Theory. A server that restarted, or a replica that took over, may have lost its latest grants. A script can't know
-- that from its keys alone. Therefore each message carries the identity of the server that answers (the stamp of
-- message.lua), and each record names the identity that granted last. If the two differ, a quarantine begins.
-- _quarantine/ is the client's side. A server of a quorum judges itself instead, see voter.lua.

-- Returns for how many ms this server must grant nothing, because leases that the server has lost may be alive; and the
-- evidence for that, as text. `recorded` is the identity or the evidence in a record, `ttl` the ttl of the record's
-- last lease, and `fence` the record's fence; nil if there is no record. A record names the identity of the server that
-- granted last. If this server has another identity, there was a restart or a failover in between, which may have lost
-- the latest grants. Without a record, the previous identity that the client names is the evidence. So is it for a
-- record that was written before this server became the primary again: no fence is lower than the clock at its grant.
--
-- The evidence is "<lost identity>><this identity>><since>+<wait>". Scripts store the evidence, so that a client which
-- met this server later, and therefore knows only a later `since`, does not wait longer; and that a client with a
-- smaller `wait` than another one does not wait less. (An earlier version stores no `wait`.) A client that does not
-- know that this server has returned, or is a spare, knows only a `since` that is too early: its evidence gives way to
-- that of a client which knows it, and begins with "@".
local function decide_quarantine(recorded, ttl, fence)
  if IDENTITY == '-' or recorded == IDENTITY and not HAS_RETURNED then return 0 end
  local since, wait, grace, previous, lossless = string.match(STAMP, '[ *](%d+) (%d+) (%d+) (%S+) ?(.*)')
  local evidence, successor, known_since, known_wait = string.match(recorded or '', '^([^>]*)>([^>]*)>(%d+)%+?(%d*)')
  local is_older = HAS_RETURNED and fence and fence < since * 1000 and evidence ~= previous
  local tells_less = successor == IDENTITY and string.byte(previous) == AT_SIGN and string.byte(evidence) ~= AT_SIGN
  if not recorded or recorded == '-' or is_older or tells_less then
    recorded, evidence, successor = previous, nil, nil
  end
  if recorded == '-' or recorded == IDENTITY then return 0 end
  if successor == IDENTITY then
    local is_known = evidence == previous or string.byte(evidence) ~= AT_SIGN
    since = is_known and math.min(since, known_since) or known_since
  elseif successor and string.byte(evidence) == AT_SIGN
    and string.sub(successor, 1, 13) == string.sub(IDENTITY, 1, 13) then
    since = math.max(since, known_since)  -- this process, which had another identity before its first replica came
  end
  since = math.min(since, get_time_us() / 1000)  -- else, if the clock was set back by hours, it would last for hours
  wait = math.max(wait, ttl or 0, tonumber(known_wait) or 0)
  recorded = evidence or recorded
  for prefix, min_ttl in string.gmatch(lossless, '([^ /]+)/?(%d*)') do
    if string.sub(recorded, 1, #prefix) == prefix and (tonumber(min_ttl) or 0) <= tonumber(ttl or 0) then return 0 end
  end
  if not evidence and string.sub(previous, 1, 2) == '@@' then recorded = previous end  -- `since` is of one who knows
  local left_ms = math.max(0, math.ceil(since + wait + grace - get_time_us() / 1000))
  return left_ms, string.format('%s>%s>%.0f+%.0f', recorded, IDENTITY, since, wait)
end

-- Makes a record say that a lease lasts `ttl` ms, if it says less. After a failover, a client whose max_ttl is smaller
-- than this ttl waits as long as the record says.
local function raise_recorded_ttl(its_record, ttl)
  local stored = redis.pcall('GET', its_record)
  local first_words, stored_ttl, last_words =
    string.match(type(stored) == 'string' and stored or '', '^(1 %a+ %d+ %S+ )(%d+)( .*)')
  if stored_ttl and tonumber(stored_ttl) < tonumber(ttl) then
    redis.pcall('SET', its_record, first_words .. ttl .. last_words, 'KEEPTTL')
  end
end

-- Makes a record outlive a lease of `ttl` ms. A record may lack up to half of RECORD_TTL_MS. So most calls write
-- nothing, unless the lease was extended.
local function extend_record(its_record, ttl)
  local min_record_ttl = math.max(RECORD_TTL_MS, ttl + RECORD_TTL_MS / 2)
  if call('PTTL', its_record) < min_record_ttl then call('PEXPIRE', its_record, RECORD_TTL_MS + ttl) end
end

-- Returns the fence after `fence`, and by how many ms that fence is ahead of the server's clock. `recorded` is the
-- identity under which `fence` was granted. A fence is at least the clock in µs, so that it passes the fences of grants
-- that this server has lost. The servers of a quorum count instead, so that all of them propose the same fence; a
-- server that may have lost grants (its identity differs from the record's) takes the clock.
local function next_fence(fence, recorded)
  local now_us = get_time_us()
  local following = IN_QUORUM and fence > 0 and recorded == IDENTITY and fence + 1 or math.max(fence + 1, now_us)
  return following, math.max(0, math.ceil((following - now_us) / 1000))
end
