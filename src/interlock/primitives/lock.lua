-- The lock: one holder, and a queue that lives in the server and hands over.
--
-- Theory. The lock is a plain string whose value is its holder's token, so it excludes, and is excluded by,
-- anyone who uses SET key token NX PX. Who waits stands in a sorted set, by arrival. Whoever ends a hold
-- hands the lock to the oldest live waiter in the same step and wakes only that one: there is no moment in
-- which a newcomer could overtake, and no herd. A handover is a short grant (the waiter's `handover_ttl`) until
-- the waiter confirms it by asking again, so a lock handed to a dead process is free again in seconds.
--
-- Rules. (1) Every verb may come twice or late and then changes nothing more. (2) Any request that finds the
-- key absent hands over to the head. (3) State first, then PUBLISH, which may fail. (4) Nothing without a TTL.
-- (5) A TTL is only ever lengthened by who holds it. (6) Every decision is by the server's clock. (7) Who takes over
-- from an owner of the same name may hold beside it, being the same; another one may not, until that lease has run out.
-- (8) While leases may be alive that this server has lost, nobody is granted anything: a marker holds the lock.
--
-- KEYS   1 lock     string  <token>, or !<token> once revoked, or !taken-over, by rule 7, or !quarantine:<evidence>, by 8
--        2 record   string  "1 <kind> <fence> <identity> <ttl ms> <last released> <holder> <channel>[ !<why revoked>]";
--                           "-" is none; kind is "unknown" after a quarantine of what left no record; identity and
--                           ttl are those of the last grant; identity is the evidence in a quarantine, see quarantine_left()
--        3 queue    zset    token of a waiter -> number of arrival
--        4 waiters  hash    token of a waiter -> as in queue.lua; a waiter wants "<kind>"
--        5 gone     zset    token that left in doubt -> forget after, ms: a late acquire of it takes nothing;
--                           "ousted" -> until when one that was taken over from may believe in its lease
--        ... for `renew`: lock, record, lock, record, ... of many locks instead; for `execute`: its keys follow
-- ARGV   1 verb, then
--   acquire  token  ttl ms  life ms  heard 0|1  channel  wait 0|1  owner  kind
--                             `owner`: takes over from a holder whose token begins so, or ""
--                             `kind`: lock, or what is built over it: election, once
--                             RETURN {GRANTED, fence} | {QUEUED | BUSY, holder, its pttl ms, head 0|1}
--                                  | {RETRY} | {NOT_FOUND} | {REVOKED, why} | {NO_EXPIRY, value} | {WRONG_KIND, record}
--   release  token  gone ms   RETURN {was it ours 0|1, again 0|1}     also takes a waiter out of the queue
--   vouch    channel  heard 0|1  (token  life ms)...
--                             RETURN {pttl ms | MORE_EXPIRED, head's token | "", state...}   state: GRANTED | QUEUED | RETRY | NOT_FOUND
--   renew    (token  ttl ms)...     RETURN {state...}   state: GRANTED | NOT_FOUND | {REVOKED, why} | error text
--   execute  token  command  argument...    RETURN {GRANTED, reply} | {NOT_FOUND}
--   fence    token  fence     RETURN {GRANTED | NOT_FOUND}   in a quorum: on this fence they have agreed
--   revoke   token  force 0|1  why          RETURN {done 0|1, pttl ms}   not done: another holder, or no TTL
--   keys     command  argument...           RETURN {key...}   which of the arguments are keys
--   inspect  most waiters     RETURN {value | "", pttl ms, record | "", number of waiters, token...}

--include queue

local LOCK = KEYS[1]
-- What the record says, after read_record(); `rest` is what follows the words that this version knows.
local kind, fence, granted_by, last_ttl, last_released, tail, record = nil, 0, '-', '0', '-', '', nil
local is_readable = true

-- Whether the record is missing or ours to read: of this version, and of a lock or what is built over it. The script
-- leaves any other record as it is, and grants nobody anything.
local function read_record()
  record = call('GET', RECORD)
  if not record then return true end
  local stored_kind, stored_fence, identity, ttl, released, tail_at =
    string.match(record, '^1 (%a+) (%d+) (%S+) (%d+) (%S+) %S+ %S+()')
  is_readable = stored_kind == 'lock' or stored_kind == 'unknown' or stored_kind == 'election' or stored_kind == 'once'
  if not is_readable then return false end
  if stored_kind ~= 'unknown' then kind = stored_kind end
  fence, granted_by, last_ttl, last_released, tail =
    tonumber(stored_fence), identity, ttl, released, string.sub(record, tail_at)
  return true
end

-- Its holder and channel. Only rare verbs need these.
local function parse_holder()
  if is_readable and record then return string.match(record, '^1 %a+ %d+ %S+ %d+ %S+ (%S+) (%S+)') end
end

-- Why the lease was revoked, by what follows the words of the record. A version before wrote it without the mark.
local function parse_reason(text)
  local _, why = split_free_text(text)
  return why or string.sub(text, 2)
end

-- The only function that stores the record. The record outlives a lease of `ttl` ms by RECORD_TTL_MS, and ends after the
-- clock has reached the fence, even if the clock was set back: the fence is `ahead` ms ahead of the clock. Without a ttl
-- the record keeps the TTL that it has, which is right for the fence that it has.
local function write_record(holder, channel, text, ttl, ahead_ms)
  local value = string.format(
    '1 %s %.0f %s %s %s %s %s%s', kind or 'unknown', fence, granted_by, last_ttl, last_released, holder, channel, text
  )
  if not ttl then return call('SET', RECORD, value, 'KEEPTTL') end
  ahead_ms = ahead_ms or math.max(0, math.ceil((fence - get_time_us()) / 1000))
  local record_ttl = math.max(RECORD_TTL_MS + ttl + ahead_ms, call('PTTL', RECORD))
  call('SET', RECORD, value, 'PX', string.format('%.0f', record_ttl))
end

-- The record, with what has changed in it.
local function update_record(holder)
  local stored_holder, channel = parse_holder()
  write_record(stored_holder or holder, channel or '-', tail, 0)
end

-- The lock's own key is set last: if the server has no memory left for either, nothing is granted.
-- The fence of what runs once is also when it began: never counted.
local function grant(new_holder, ttl, channel)
  local ahead_ms
  fence, ahead_ms = next_fence(fence, kind ~= 'once' and granted_by)
  granted_by, last_ttl = IDENTITY, ttl
  write_record(new_holder, channel, '', ttl, ahead_ms)  -- it begins anew: what a later version noted was of another grant
  call('SET', LOCK, new_holder, 'PX', ttl)
end

-- Of what a marker is the evidence; nil if it is none.
local function parse_marker(holder)
  return holder and string.match(holder, '^!quarantine:(.*)')
end

-- The marker, if nothing may be granted now: it holds the lock, if nobody else does. The record keeps the evidence,
-- which others may not have.
local function apply_quarantine(holder)
  if not is_readable then return end
  local left_ms, evidence = quarantine_left(granted_by, last_ttl)
  if left_ms == 0 then return end
  if kind and granted_by ~= evidence then
    granted_by = evidence
    update_record('-')
  end
  if not holder then call('SET', LOCK, '!quarantine:' .. evidence, 'PX', left_ms) end
  return '!quarantine:' .. evidence
end

-- Nobody holds the lock now: hand it to the head of the queue, or free it. The head stays in the queue
-- until it confirms. Returns who got it, whether to come again, and why the head could not be granted it. `first`: the
-- head, if next_waiter() was asked already.
local function hand_over(head)
  if apply_quarantine() then return nil, 0 end
  local retry = 0
  if not is_readable then
    head = nil
  elseif not head then
    head, retry = next_waiter(0)
  end
  local is_granted, failure = false, nil
  if head then
    local waiter, handover_ttl, channel, wants = unpack(head)
    kind = kind or string.match(wants, '^%a+')
    is_granted, failure = pcall(grant, waiter, handover_ttl, channel)
    if is_granted then
      announce_grant(waiter, handover_ttl, channel, wants)
      return waiter, 0
    end
  end
  call('DEL', LOCK)  -- allowed even when the server is out of memory and the grant was refused
  return nil, retry, failure
end

if verb == 'acquire' then
  local ttl, handover_ttl, subscribed, channel, may_wait = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local owner, wanted_kind = ARGV[8], ARGV[9]
  local holder = call('GET', LOCK)
  if not read_record() or kind and kind ~= wanted_kind then return {WRONG_KIND, record} end
  kind = wanted_kind
  local evidence = parse_marker(holder)
  if evidence and IDENTITY ~= '-' then  -- this client may know more, and so that it is over
    if granted_by == '-' then granted_by = evidence end
    holder = nil
  end
  local marker = holder ~= token and apply_quarantine(holder)
  holder = holder or marker
  local has_queue_or_tombstones = call('EXISTS', QUEUE, TOMBSTONES) > 0
  if holder == token then  -- the same request again, or the confirmation of a handover
    if has_queue_or_tombstones then dequeue(token) end
    local pttl = call('PTTL', LOCK)
    if parse_holder() ~= token then grant(token, math.max(pttl, ttl), channel) end  -- the record was evicted
    if pttl <= tonumber(ttl) then call('PEXPIRE', LOCK, ttl) end  -- always a write, for replicas to acknowledge
    return {GRANTED, fence}
  end
  if has_queue_or_tombstones then
    if call('ZSCORE', TOMBSTONES, token) then return {NOT_FOUND} end
    if not holder then
      local head, retry = next_waiter(0)
      if retry == 1 then return {RETRY} end
      if head and head[1] ~= token then
        local _, failure
        holder, _, failure = hand_over(head)
        if failure then  -- nobody overtakes for that
          return type(failure) == 'table' and failure or redis.error_reply(failure)
        end
      end
    end
  end
  if holder and not marker and owner ~= '' and string.sub(holder, 1, #owner) == owner then
    local pttl = call('PTTL', LOCK)  -- the same owner, in another process: its new token ends the old one
    local stored_holder, old_channel = parse_holder()
    ttl = math.max(ttl, pttl)
    add_tombstone('ousted', string.format('%.0f', pttl))
    if stored_holder == holder then publish(old_channel, 'revoked ' .. holder .. ' !its owner is at work elsewhere') end
    holder = nil
  end
  if not holder then
    grant(token, ttl, channel)
    if has_queue_or_tombstones then dequeue(token) end
    return {GRANTED, fence}
  end
  if holder == '!' .. token then
    return {REVOKED, parse_reason(tail)}
  end
  local pttl = call('PTTL', LOCK)
  if pttl == -1 then return {NO_EXPIRY, holder} end
  if may_wait ~= '1' then return {BUSY, holder, pttl, 0} end
  enqueue(token, handover_ttl, subscribed, channel, ' ' .. kind)
  return {QUEUED, holder, pttl, call('ZRANGE', QUEUE, 0, 0)[1] == token and 1 or 0}

elseif verb == 'release' then
  local tombstone_ttl = ARGV[3]
  local holder = call('GET', LOCK)
  read_record()
  local is_ours, retry = holder == token or last_released == token, 0
  local has_queue_or_tombstones = call('EXISTS', QUEUE, TOMBSTONES) > 0
  if has_queue_or_tombstones then dequeue(token) end
  if holder == token then last_released = token end
  if not holder or holder == token or holder == '!' .. token then
    local new_holder
    local taken_over_ms = holder and has_queue_or_tombstones
      and (call('ZSCORE', TOMBSTONES, 'ousted') or 0) - get_time_us() / 1000 or 0
    if taken_over_ms >= 1 then
      call('SET', LOCK, '!taken-over', 'PX', math.floor(taken_over_ms))  -- nobody's, until then
    elseif has_queue_or_tombstones then
      new_holder, retry = hand_over()
    else
      call('DEL', LOCK)
    end
    -- Only the answer to a release that comes twice hangs on this, so out of memory it may fail.
    if not new_holder and is_ours and record and is_readable then
      pcall(write_record, '-', '-', (split_free_text(tail)))
    end
  end
  add_tombstone(token, tombstone_ttl)
  return {is_ours and 1 or 0, retry}

elseif verb == 'vouch' then
  local holder
  return heartbeat(
    function()
      read_record()
      local retry
      holder = call('GET', LOCK)
      if not holder then holder, retry = hand_over() end
      if retry == 1 then return MORE_EXPIRED end
      return call('PTTL', LOCK), parse_marker(call('GET', LOCK)) or not is_readable
    end,
    function(waiter) return waiter == holder end
  )

elseif verb == 'renew' then
  local states = {}
  for i = 1, #KEYS, 2 do
    local lock, its_record, lease_token, ttl = KEYS[i], KEYS[i + 1], ARGV[i + 1], tonumber(ARGV[i + 2])
    local holder = redis.pcall('GET', lock)  -- one key of a wrong type must not stop the others
    if type(holder) == 'table' then
      states[#states + 1] = holder.err
    elseif holder == lease_token then
      if call('PTTL', lock) < ttl then call('PEXPIRE', lock, ttl) end
      -- Seldom a write, but for a lease that was extended.
      local min_record_ttl = math.max(RECORD_TTL_MS, ttl + RECORD_TTL_MS / 2)
      if call('PTTL', its_record) < min_record_ttl then call('PEXPIRE', its_record, RECORD_TTL_MS + ttl) end
      states[#states + 1] = GRANTED
    else
      if not holder and call('EXISTS', its_record) == 0 then  -- who knows that it was held is a witness, too
        local left_ms, evidence = quarantine_left()
        if left_ms > 0 then redis.pcall('SET', lock, '!quarantine:' .. evidence, 'PX', left_ms) end
      end
      if holder == '!' .. lease_token then
        local stored = redis.pcall('GET', its_record)
        local text = type(stored) == 'string' and string.match(stored, '^1 %a+ %d+ %S+ %d+ %S+ %S+ %S+(.*)')
        states[#states + 1] = {REVOKED, text and parse_reason(text) or ''}
      else
        states[#states + 1] = NOT_FOUND
      end
    end
  end
  return states

elseif verb == 'fence' then
  local agreed_fence = ARGV[3]
  if call('GET', LOCK) ~= token or not read_record() then return {NOT_FOUND} end
  fence = math.max(fence, agreed_fence)
  update_record(token)
  return {GRANTED}

elseif verb == 'execute' then
  return execute_command(call('GET', LOCK) == token)

elseif verb == 'revoke' then
  local force, reason = ARGV[3], ARGV[4]
  local holder, pttl = call('GET', LOCK), call('PTTL', LOCK)
  local named_evidence = parse_marker(token)
  if named_evidence then
    if force ~= '1' or holder and not parse_marker(holder) or not read_record() then return {0, pttl} end
    local left_ms, evidence = quarantine_left(granted_by == '-' and parse_marker(holder) or granted_by, last_ttl)
    -- The message ends only the quarantine that it names: it may be late, and its sender have seen the server before.
    if left_ms > 0 and string.match(evidence, '.*>') ~= string.match(named_evidence, '.*>') then return {0, pttl} end
    if left_ms == 0 and holder ~= token then return {0, pttl} end
    -- Somebody knows that nothing is at work: from here on it is as if granted here. Fences go on from where the clock
    -- would be after all of the quarantine, and pass those of lost grants, though the clock may be behind or they counted.
    granted_by, fence = IDENTITY, math.max(fence + 1000000, get_time_us() + math.max(left_ms, pttl) * 1000)
    write_record('-', '-', (split_free_text(tail)), 0)
  else
    if holder ~= token or force ~= '1' and pttl < 0 then return {0, pttl} end
    read_record()
  end
  local owner, channel = parse_holder()
  if force ~= '1' then
    call('SET', LOCK, '!' .. token, 'PX', math.max(1, pttl))
    if owner then write_record(owner, channel, split_free_text(tail) .. ' !' .. reason) end
  else
    dequeue(token)  -- it may not have confirmed yet, and would be the next one
    hand_over()
  end
  if channel then publish(channel, 'revoked ' .. token .. ' !' .. reason) end
  return {1, pttl}

elseif verb == 'keys' then
  return call('COMMAND', 'GETKEYS', unpack(ARGV, 2))

elseif verb == 'inspect' then
  local max_waiters, holder, pttl = ARGV[2], call('GET', LOCK), call('PTTL', LOCK)
  if (not holder or parse_marker(holder)) and read_record() then
    local left_ms, evidence = quarantine_left(granted_by == '-' and parse_marker(holder) or granted_by, last_ttl)
    if left_ms > 0 then holder, pttl = '!quarantine:' .. evidence, left_ms end
  end
  return {holder or '', pttl, call('GET', RECORD) or '', call('ZCARD', QUEUE),
    unpack(call('ZRANGE', QUEUE, 0, max_waiters - 1))}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
