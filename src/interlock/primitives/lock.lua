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
-- (5) A TTL is only ever lengthened by who holds it. (6) Every decision is by the server's clock.
--
-- KEYS   1 lock     string  <token>, or !<token> once revoked
--        2 record   string  "1 lock <fence> <last released> <holder> <channel> [<why revoked>]"; "-" is none
--        3 queue    zset    token of a waiter -> number of arrival
--        4 waiters  hash    token of a waiter -> "<alive until, ms> <life, ms> <heard 0|1> <channel>"
--        5 gone     zset    token that left in doubt -> forget after, ms: a late acquire of it takes nothing
--        ... for `renew`: lock, record, lock, record, ... of many locks instead; for `execute`: its keys follow
-- ARGV   1 verb, then
--   acquire  token  ttl ms  life ms  heard 0|1  channel  wait 0|1
--                             RETURN {GRANTED, fence} | {QUEUED | BUSY, holder, its pttl ms, head 0|1}
--                                  | {AGAIN} | {GONE} | {REVOKED, why} | {FOREIGN, value} | {MISUSED, record}
--   release  token  gone ms   RETURN {was it ours 0|1, again 0|1}     also takes a waiter out of the queue
--   vouch    channel  heard 0|1  (token  life ms)...
--                             RETURN {pttl ms, head's token | "", state...}   state: GRANTED | QUEUED | GONE
--   renew    (token  ttl ms)...     RETURN {state...}   state: GRANTED | GONE | REVOKED | error text
--   execute  token  command  argument...    RETURN {GRANTED, reply} | {GONE}
--   revoke   token  force 0|1  why          RETURN {done 0|1, pttl ms}   not done: another holder, or no TTL
--   keys     command  argument...           RETURN {key...}   which of the arguments are keys
--   inspect  most waiters     RETURN {value | "", pttl ms, record | "", number of waiters, token...}

local GRANTED, QUEUED, BUSY, AGAIN, GONE, REVOKED, FOREIGN, MISUSED = 1, 2, 3, 4, 5, 6, 7, 8
local RECORD_MS, QUEUE_MS, ALIVE_MS, SKIP = 300000, 10000, 3000, 32
local LOCK, RECORD, QUEUE, WAITERS, GONES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local call, verb, token = redis.call, ARGV[1], ARGV[2]
local fence, released, text = 0, '-', nil  -- what the record says, once read() was called

local function micros()
  local t = call('TIME')
  return t[1] * 1000000 + t[2]
end

-- Whether the record is missing or ours to read: of a lock, and of this version.
local function read()
  text = call('GET', RECORD)
  if not text then return true end
  local f, r = string.match(text, '^1 lock (%d+) (%S+)')
  if not f then return false end
  fence, released = tonumber(f), r
  return true
end

-- The rest of it: holder, channel, why revoked. Only rare verbs need these.
local function holding()
  return string.match(text or '', '^1 lock %d+ %S+ (%S+) (%S+) ?(.*)')
end

local function record(holder, channel, why)
  return string.format('1 lock %.0f %s %s %s%s', fence, released, holder, channel, why or '')
end

-- The record outlives the hold by far, and its fence even if the clock is set back. The lock's own key is set
-- last: if the server has no memory left for either, nothing is granted.
local function grant(to, ttl, channel)
  local now = micros()
  fence = math.max(fence + 1, now)
  call('SET', RECORD, record(to, channel), 'PX', RECORD_MS + ttl + math.ceil((fence - now) / 1000))
  call('SET', LOCK, to, 'PX', ttl)
end

local function leave(who)
  call('ZREM', QUEUE, who)
  call('HDEL', WAITERS, who)
end

-- Whether a waiter can be woken: one that was subscribed and is not any more has died, or lost its connection.
-- Where the server may not be asked, we believe so.
local function reachable(heard, channel)
  if heard ~= '1' then return true end
  local subscribers = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return subscribers.err or subscribers[2] > 0
end

-- The waiter whose turn it is, with its life and channel, or nothing: the oldest live one that can be woken, or,
-- if none can, the oldest live one. A waiter that lost its connection may come back, so it keeps its place. The
-- dead are dropped. All that for a bounded number in one step: then the second result says to come again.
local function head()
  local now, place, mute = nil, 0, nil
  for _ = 1, SKIP do
    local first = call('ZRANGE', QUEUE, place, place)[1]
    if not first then break end
    local alive, life, heard, channel = string.match(call('HGET', WAITERS, first) or '', '^(%d+) (%d+) (%d) (%S+)')
    now = now or micros() / 1000
    if not (alive and tonumber(alive) > now) then
      leave(first)
    elseif reachable(heard, channel) then
      return first, 0, life, channel
    else
      mute = mute or {first, 0, life, channel}
      place = place + 1
    end
  end
  if mute then return unpack(mute) end
  return nil, call('EXISTS', QUEUE)
end

-- Nobody holds the lock now: hand it to the head of the queue, or free it. The head stays in the queue
-- until it confirms. Returns who got it, whether to come again, and why the head could not be granted it.
local function hand_over()
  local first, again, life, channel = head()
  local fine, why = false, nil
  if first then fine, why = pcall(grant, first, life, channel) end
  if fine then
    -- It lives as long as its grant, unless it is heard of again.
    local until_ms = string.format('%.0f %s 0 %s', micros() / 1000 + life, life, channel)
    call('HSET', WAITERS, first, until_ms)
    redis.pcall('PUBLISH', channel, 'granted ' .. first)
    return first, 0
  end
  call('DEL', LOCK)  -- allowed even when the server is out of memory and the grant was refused
  return nil, again, why
end

if verb == 'acquire' then
  local ttl, life, heard, channel, wait = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local holder = call('GET', LOCK)
  if not read() then return {MISUSED, text} end
  local crowded = call('EXISTS', QUEUE, GONES) > 0
  if holder == token then  -- the same request again, or the confirmation of a handover
    if crowded then leave(token) end
    local pttl = call('PTTL', LOCK)
    if holding() ~= token then grant(token, math.max(pttl, ttl), channel) end  -- the record was evicted
    if pttl < tonumber(ttl) then call('PEXPIRE', LOCK, ttl) end
    return {GRANTED, fence}
  end
  if crowded then
    if call('ZSCORE', GONES, token) then return {GONE} end
    if not holder then
      local first, again = head()
      if again == 1 then return {AGAIN} end
      if first and first ~= token then
        local _, why
        holder, _, why = hand_over()
        if why then return type(why) == 'table' and why or redis.error_reply(why) end  -- nobody overtakes for that
      end
    end
  end
  if not holder then
    grant(token, ttl, channel)
    if crowded then leave(token) end
    return {GRANTED, fence}
  end
  if holder == '!' .. token then
    local _, _, why = holding()
    return {REVOKED, why or ''}
  end
  local pttl = call('PTTL', LOCK)
  if pttl == -1 then return {FOREIGN, holder} end
  if wait ~= '1' then return {BUSY, holder, pttl, 0} end
  local alive = micros() / 1000 + ALIVE_MS
  call('PEXPIRE', QUEUE, QUEUE_MS)  -- before the first write: who has no right to it leaves nothing
  if not call('ZSCORE', QUEUE, token) then
    local newest = call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0
    call('ZADD', QUEUE, string.format('%.0f', newest + 1), token)
    call('PEXPIRE', QUEUE, QUEUE_MS)
  end
  call('HSET', WAITERS, token, string.format('%.0f %s %s %s', alive, life, heard, channel))
  call('PEXPIRE', WAITERS, QUEUE_MS)
  return {QUEUED, holder, pttl, call('ZRANGE', QUEUE, 0, 0)[1] == token and 1 or 0}

elseif verb == 'release' then
  local gone = ARGV[3]
  local holder = call('GET', LOCK)
  read()
  local ours, again = holder == token or released == token, 0
  local crowded = call('EXISTS', QUEUE) > 0
  if crowded then leave(token) end
  if holder == token then released = token end
  if not holder or holder == token or holder == '!' .. token then
    local got
    if crowded then got, again = hand_over() else call('DEL', LOCK) end
    -- Only the answer to a release that comes twice hangs on this, so out of memory it may fail.
    if not got and ours and text then redis.pcall('SET', RECORD, record('-', '-'), 'KEEPTTL') end
  end
  if gone ~= '0' then
    local now = micros() / 1000
    call('PEXPIRE', GONES, gone)
    call('ZREMRANGEBYSCORE', GONES, '-inf', string.format('%.0f', now))
    redis.pcall('ZADD', GONES, string.format('%.0f', now + gone), token)
    call('PEXPIRE', GONES, gone)
  end
  return {ours and 1 or 0, again}

elseif verb == 'vouch' then
  local channel, heard, states = ARGV[2], ARGV[3], {}
  local alive = string.format('%.0f', micros() / 1000 + ALIVE_MS)
  for i = 4, #ARGV, 2 do
    local queued = call('ZSCORE', QUEUE, ARGV[i])
    if queued then call('HSET', WAITERS, ARGV[i], alive .. ' ' .. ARGV[i + 1] .. ' ' .. heard .. ' ' .. channel) end
    states[#states + 1] = queued and QUEUED or GONE
  end
  call('PEXPIRE', QUEUE, QUEUE_MS)
  call('PEXPIRE', WAITERS, QUEUE_MS)
  read()
  local holder = call('GET', LOCK) or hand_over()
  for i = 4, #ARGV, 2 do
    if ARGV[i] == holder then states[i / 2 - 1] = GRANTED end
  end
  return {call('PTTL', LOCK), call('ZRANGE', QUEUE, 0, 0)[1] or '', unpack(states)}

elseif verb == 'renew' then
  local states = {}
  for i = 1, #KEYS, 2 do
    local mine, ttl = ARGV[i + 1], tonumber(ARGV[i + 2])
    local holder = redis.pcall('GET', KEYS[i])  -- one key of a wrong type must not stop the others
    if type(holder) == 'table' then
      states[#states + 1] = holder.err
    elseif holder == mine then
      if call('PTTL', KEYS[i]) < ttl then call('PEXPIRE', KEYS[i], ttl) end
      if call('PTTL', KEYS[i + 1]) < RECORD_MS then call('PEXPIRE', KEYS[i + 1], RECORD_MS + ttl) end
      states[#states + 1] = GRANTED
    else
      states[#states + 1] = holder == '!' .. mine and REVOKED or GONE
    end
  end
  return states

elseif verb == 'execute' then
  local command = ARGV[3]
  if call('GET', LOCK) ~= token then return {GONE} end
  return {GRANTED, call(command, unpack(ARGV, 4))}

elseif verb == 'revoke' then
  local force, why = ARGV[3], ARGV[4]
  local pttl = call('PTTL', LOCK)
  if call('GET', LOCK) ~= token or force ~= '1' and pttl < 0 then return {0, pttl} end
  read()
  local owner, channel = holding()
  if force ~= '1' then
    call('SET', LOCK, '!' .. token, 'PX', math.max(1, pttl))
    if owner then call('SET', RECORD, record(owner, channel, ' ' .. why), 'KEEPTTL') end
  else
    hand_over()
  end
  if channel then redis.pcall('PUBLISH', channel, 'revoked ' .. token .. ' ' .. why) end
  return {1, pttl}

elseif verb == 'keys' then
  return call('COMMAND', 'GETKEYS', unpack(ARGV, 2))

elseif verb == 'inspect' then
  local most = ARGV[2]
  return {call('GET', LOCK) or '', call('PTTL', LOCK), call('GET', RECORD) or '', call('ZCARD', QUEUE),
    unpack(call('ZRANGE', QUEUE, 0, most - 1))}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
