-- The lock: one holder, and a queue that lives in the server and hands over.
--
-- Theory. The lock is a plain string whose value is its holder's token, so it excludes, and is excluded by,
-- anyone who uses SET key token NX PX. Who waits stands in a sorted set, by arrival. Whoever ends a hold
-- hands the lock to the oldest live waiter in the same step and wakes only that one: there is no moment in
-- which a newcomer could overtake, and no herd. A handover is a short grant (the waiter's `life`) until
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
--                           ttl are those of the last grant; identity is the evidence in a quarantine, see barred()
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
--                                  | {AGAIN} | {GONE} | {REVOKED, why} | {FOREIGN, value} | {MISUSED, record}
--   release  token  gone ms   RETURN {was it ours 0|1, again 0|1}     also takes a waiter out of the queue
--   vouch    channel  heard 0|1  (token  life ms)...
--                             RETURN {pttl ms | MORE, head's token | "", state...}   state: GRANTED | QUEUED | AGAIN | GONE
--   renew    (token  ttl ms)...     RETURN {state...}   state: GRANTED | GONE | {REVOKED, why} | error text
--   execute  token  command  argument...    RETURN {GRANTED, reply} | {GONE}
--   fence    token  fence     RETURN {GRANTED | GONE}   in a quorum: on this fence they have agreed
--   revoke   token  force 0|1  why          RETURN {done 0|1, pttl ms}   not done: another holder, or no TTL
--   keys     command  argument...           RETURN {key...}   which of the arguments are keys
--   inspect  most waiters     RETURN {value | "", pttl ms, record | "", number of waiters, token...}

--include queue

local LOCK = KEYS[1]
-- What the record says, after read(); `rest` is what follows the words that this version knows.
local kind, fence, under, lasts, released, rest, text = nil, 0, '-', '0', '-', '', nil
local legible = true

-- Whether the record is missing or ours to read: of this version, and of a lock or what is built over it. The script
-- leaves any other record as it is, and grants nobody anything.
local function read()
  text = call('GET', RECORD)
  if not text then return true end
  local k, f, i, t, r, at = string.match(text, '^1 (%a+) (%d+) (%S+) (%d+) (%S+) %S+ %S+()')
  legible = k == 'lock' or k == 'unknown' or k == 'election' or k == 'once'
  if not legible then return false end
  if k ~= 'unknown' then kind = k end
  fence, under, lasts, released, rest = tonumber(f), i, t, r, string.sub(text, at)
  return true
end

-- Its holder and channel. Only rare verbs need these.
local function holding()
  if legible and text then return string.match(text, '^1 %a+ %d+ %S+ %d+ %S+ (%S+) (%S+)') end
end

-- Why the lease was revoked, by what follows the words of the record. A version before wrote it without the mark.
local function reason(more)
  local _, why = parted(more)
  return why or string.sub(more, 2)
end

-- The only function that stores the record. The record outlives a lease of `ttl` ms by RECORD_MS, and ends after the
-- clock has reached the fence, even if the clock was set back: the fence is `ahead` ms ahead of the clock. Without a ttl
-- the record keeps the TTL that it has, which is right for the fence that it has.
local function write(holder, channel, more, ttl, ahead)
  local value = string.format(
    '1 %s %.0f %s %s %s %s %s%s', kind or 'unknown', fence, under, lasts, released, holder, channel, more
  )
  if not ttl then return call('SET', RECORD, value, 'KEEPTTL') end
  ahead = ahead or math.max(0, math.ceil((fence - micros()) / 1000))
  local ms = math.max(RECORD_MS + ttl + ahead, call('PTTL', RECORD))
  call('SET', RECORD, value, 'PX', string.format('%.0f', ms))
end

-- The record, with what has changed in it.
local function amend(holder)
  local who, channel = holding()
  write(who or holder, channel or '-', rest, 0)
end

-- The lock's own key is set last: if the server has no memory left for either, nothing is granted.
-- The fence of what runs once is also when it began: never counted.
local function grant(to, ttl, channel)
  local ahead
  fence, ahead = next_fence(fence, kind ~= 'once' and under)
  under, lasts = IDENTITY, ttl
  write(to, channel, '', ttl, ahead)  -- it begins anew: what a later version noted was of another grant
  call('SET', LOCK, to, 'PX', ttl)
end

-- Of what a marker is the evidence; nil if it is none.
local function marks(holder)
  return holder and string.match(holder, '^!quarantine:(.*)')
end

-- The marker, if nothing may be granted now: it holds the lock, if nobody else does. The record keeps the evidence,
-- which others may not have.
local function quarantined(holder)
  if not legible then return end
  local ms, evidence = barred(under, lasts)
  if ms == 0 then return end
  if kind and under ~= evidence then
    under = evidence
    amend('-')
  end
  if not holder then call('SET', LOCK, '!quarantine:' .. evidence, 'PX', ms) end
  return '!quarantine:' .. evidence
end

-- Nobody holds the lock now: hand it to the head of the queue, or free it. The head stays in the queue
-- until it confirms. Returns who got it, whether to come again, and why the head could not be granted it. `first`: the
-- head, if turn() was asked already.
local function hand_over(first)
  if quarantined() then return nil, 0 end
  local again = 0
  if not legible then
    first = nil
  elseif not first then
    first, again = turn(0)
  end
  local fine, why = false, nil
  if first then
    local who, life, channel, wants = unpack(first)
    kind = kind or string.match(wants, '^%a+')
    fine, why = pcall(grant, who, life, channel)
    if fine then
      push(who, life, channel, wants)
      return who, 0
    end
  end
  call('DEL', LOCK)  -- allowed even when the server is out of memory and the grant was refused
  return nil, again, why
end

if verb == 'acquire' then
  local ttl, life, heard, channel, wait = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local holder = call('GET', LOCK)
  if not read() or kind and kind ~= ARGV[9] then return {MISUSED, text} end
  kind = ARGV[9]
  local evidence = marks(holder)
  if evidence and IDENTITY ~= '-' then  -- this client may know more, and so that it is over
    if under == '-' then under = evidence end
    holder = nil
  end
  local bar = holder ~= token and quarantined(holder)
  holder = holder or bar
  local crowded = call('EXISTS', QUEUE, GONES) > 0
  if holder == token then  -- the same request again, or the confirmation of a handover
    if crowded then leave(token) end
    local pttl = call('PTTL', LOCK)
    if holding() ~= token then grant(token, math.max(pttl, ttl), channel) end  -- the record was evicted
    if pttl <= tonumber(ttl) then call('PEXPIRE', LOCK, ttl) end  -- always a write, for replicas to acknowledge
    return {GRANTED, fence}
  end
  if crowded then
    if call('ZSCORE', GONES, token) then return {GONE} end
    if not holder then
      local first, again = turn(0)
      if again == 1 then return {AGAIN} end
      if first and first[1] ~= token then
        local _, why
        holder, _, why = hand_over(first)
        if why then return type(why) == 'table' and why or redis.error_reply(why) end  -- nobody overtakes for that
      end
    end
  end
  local owner = ARGV[8]
  if holder and not bar and owner ~= '' and string.sub(holder, 1, #owner) == owner then
    local pttl = call('PTTL', LOCK)  -- the same owner, in another process: its new token ends the old one
    local old, at = holding()
    ttl = math.max(ttl, pttl)
    bury('ousted', string.format('%.0f', pttl))
    if old == holder then tell(at, 'revoked ' .. holder .. ' !its owner is at work elsewhere') end
    holder = nil
  end
  if not holder then
    grant(token, ttl, channel)
    if crowded then leave(token) end
    return {GRANTED, fence}
  end
  if holder == '!' .. token then
    return {REVOKED, reason(rest)}
  end
  local pttl = call('PTTL', LOCK)
  if pttl == -1 then return {FOREIGN, holder} end
  if wait ~= '1' then return {BUSY, holder, pttl, 0} end
  enqueue(token, life, heard, channel, ' ' .. kind)
  return {QUEUED, holder, pttl, call('ZRANGE', QUEUE, 0, 0)[1] == token and 1 or 0}

elseif verb == 'release' then
  local gone = ARGV[3]
  local holder = call('GET', LOCK)
  read()
  local ours, again = holder == token or released == token, 0
  local crowded = call('EXISTS', QUEUE, GONES) > 0
  if crowded then leave(token) end
  if holder == token then released = token end
  if not holder or holder == token or holder == '!' .. token then
    local got
    local ousted = holder and crowded and (call('ZSCORE', GONES, 'ousted') or 0) - micros() / 1000 or 0
    if ousted >= 1 then
      call('SET', LOCK, '!taken-over', 'PX', math.floor(ousted))  -- nobody's, until then
    elseif crowded then
      got, again = hand_over()
    else
      call('DEL', LOCK)
    end
    -- Only the answer to a release that comes twice hangs on this, so out of memory it may fail.
    if not got and ours and text and legible then pcall(write, '-', '-', (parted(rest))) end
  end
  bury(token, gone)
  return {ours and 1 or 0, again}

elseif verb == 'vouch' then
  local holder
  return vouch(
    function()
      read()
      local again
      holder = call('GET', LOCK)
      if not holder then holder, again = hand_over() end
      if again == 1 then return MORE end
      return call('PTTL', LOCK), marks(call('GET', LOCK)) or not legible
    end,
    function(who) return who == holder end
  )

elseif verb == 'renew' then
  local states = {}
  for i = 1, #KEYS, 2 do
    local mine, ttl = ARGV[i + 1], tonumber(ARGV[i + 2])
    local holder = redis.pcall('GET', KEYS[i])  -- one key of a wrong type must not stop the others
    if type(holder) == 'table' then
      states[#states + 1] = holder.err
    elseif holder == mine then
      if call('PTTL', KEYS[i]) < ttl then call('PEXPIRE', KEYS[i], ttl) end
      local least = math.max(RECORD_MS, ttl + RECORD_MS / 2)  -- seldom a write, but for a lease that was extended
      if call('PTTL', KEYS[i + 1]) < least then call('PEXPIRE', KEYS[i + 1], RECORD_MS + ttl) end
      states[#states + 1] = GRANTED
    else
      if not holder and call('EXISTS', KEYS[i + 1]) == 0 then  -- who knows that it was held is a witness, too
        local ms, evidence = barred()
        if ms > 0 then redis.pcall('SET', KEYS[i], '!quarantine:' .. evidence, 'PX', ms) end
      end
      if holder == '!' .. mine then
        local record = redis.pcall('GET', KEYS[i + 1])
        local more = type(record) == 'string' and string.match(record, '^1 %a+ %d+ %S+ %d+ %S+ %S+ %S+(.*)')
        states[#states + 1] = {REVOKED, more and reason(more) or ''}
      else
        states[#states + 1] = GONE
      end
    end
  end
  return states

elseif verb == 'fence' then
  if call('GET', LOCK) ~= token or not read() then return {GONE} end
  fence = math.max(fence, ARGV[3])
  amend(token)
  return {GRANTED}

elseif verb == 'execute' then
  return execute(call('GET', LOCK) == token)

elseif verb == 'revoke' then
  local force, why = ARGV[3], ARGV[4]
  local holder, pttl = call('GET', LOCK), call('PTTL', LOCK)
  local named = marks(token)
  if named then
    if force ~= '1' or holder and not marks(holder) or not read() then return {0, pttl} end
    local ms, evidence = barred(under == '-' and marks(holder) or under, lasts)
    -- The message ends only the quarantine that it names: it may be late, and its sender have seen the server before.
    if ms > 0 and string.match(evidence, '.*>') ~= string.match(named, '.*>') then return {0, pttl} end
    if ms == 0 and holder ~= token then return {0, pttl} end
    -- Somebody knows that nothing is at work: from here on it is as if granted here. Fences go on from where the clock
    -- would be after all of the quarantine, and pass those of lost grants, though the clock may be behind or they counted.
    under, fence = IDENTITY, math.max(fence + 1000000, micros() + math.max(ms, pttl) * 1000)
    write('-', '-', (parted(rest)), 0)
  else
    if holder ~= token or force ~= '1' and pttl < 0 then return {0, pttl} end
    read()
  end
  local owner, channel = holding()
  if force ~= '1' then
    call('SET', LOCK, '!' .. token, 'PX', math.max(1, pttl))
    if owner then write(owner, channel, parted(rest) .. ' !' .. why) end
  else
    leave(token)  -- it may not have confirmed yet, and would be the next one
    hand_over()
  end
  if channel then tell(channel, 'revoked ' .. token .. ' !' .. why) end
  return {1, pttl}

elseif verb == 'keys' then
  return keys()

elseif verb == 'inspect' then
  local most, holder, pttl = ARGV[2], call('GET', LOCK), call('PTTL', LOCK)
  if (not holder or marks(holder)) and read() then
    local ms, evidence = barred(under == '-' and marks(holder) or under, lasts)
    if ms > 0 then holder, pttl = '!quarantine:' .. evidence, ms end
  end
  return {holder or '', pttl, call('GET', RECORD) or '', call('ZCARD', QUEUE),
    unpack(call('ZRANGE', QUEUE, 0, most - 1))}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
