-- The barrier: a number of parties wait for each other and go on together, again and again.
--
-- Theory. The barrier numbers the arrivals. The arrivals up to `passed` have gone on. When `parties` more have arrived,
-- they pass as well. The script remembers an arrival for a while after it has passed, so that a party whose reply got
-- lost learns that it has passed, and does not arrive twice. Waiting parties send heartbeats. A request that finds a
-- party without heartbeats breaks the barrier, and so does a party that leaves. The barrier stays broken until a reset,
-- which begins another generation. The script wakes parties in order of arrival, a bounded number in one call; the
-- field `told` of the hash is the last arrival that it woke. Each woken party asks again and thereby wakes more. A
-- party whose push got lost learns the outcome from its next heartbeat.
--
-- KEYS   1 barrier  hash     parties; arrivals; passed; told; why: the reason, if the barrier is broken
--        2 record   string  "1 barrier <generation>"
--        3 queue    zset    token of an arrival -> its number
--        4 waiters  hash    as in queue.lua; a waiter wants "<its index>"
--        5 gone     zset    as in queue.lua; also the parties that a reset sent away, and the operations that were done
--        6 present  zset    token of a waiting party -> alive until, ms
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply
--   acquire  token  ttl ms  handover ttl ms  subscribed 0|1  channel  max waiters  parties  generation
--                             max waiters: as in latch.lua
--                             RETURN {GRANTED, index} | {QUEUED, arrived, 1000, 0, generation} | {BROKEN, why}
--                                  | {LIMIT_MISMATCH, parties} | {WRONG_KIND, record}
--                             generation: in which the party has arrived already, or ""
--   release  token  tombstone ttl ms
--                             RETURN {0, 0}
--                             breaks the barrier if the party waits
--   heartbeat  channel  subscribed 0|1  (token  handover ttl ms)...
--                             RETURN {1000, head's token | "", state...}
--   reset    operation        RETURN {done 0|1} | {WRONG_KIND, record}
--                             runs once for each operation
--   revoke   operation  why   RETURN {done 0|1}
--                             runs once for each operation; not done: the barrier is broken, or there is none
--   inspect  max parties      RETURN {generation | "", parties, arrived, why | "", token...}

--include message
--include queue

local BARRIER, PRESENT = KEYS[1], KEYS[6]
-- BROKEN: a reply code, as in message.lua. ARRIVAL_TTL_MS: how long the script remembers an arrival that has passed,
-- and an operation.
local BROKEN, ARRIVAL_TTL_MS = 10, 60000
local generation, record, parties, arrivals, passed, woken, reason  -- woken: the field `told`
local tail = ''  -- the rest of the record, after the words that this version knows

-- Reads the barrier into the variables above. Returns false if another version or another kind of primitive owns the
-- record, or if the key is a hash of somebody else, which a barrier would delete: then there is no record.
local function read_barrier()
  record = call('GET', RECORD)
  local stored_generation, text = string.match((record or '') .. ' ', '^1 barrier (%d+)( .*)')
  if record and not stored_generation then return false end
  local stored = call('HMGET', BARRIER, 'parties', 'arrivals', 'passed', 'told', 'why')
  if not record and not stored[1] and call('PTTL', BARRIER) ~= -2 then
    record = ''
    return false
  end
  if record and stored[1] then
    generation, tail, parties = stored_generation, string.sub(text, 1, -2), tonumber(stored[1])
    arrivals, passed, woken, reason = tonumber(stored[2]), tonumber(stored[3]), tonumber(stored[4]), stored[5]
  end
  return true
end

local function refresh_ttls()
  call('PEXPIRE', RECORD, RECORD_TTL_MS)
  call('PEXPIRE', BARRIER, RECORD_TTL_MS)
  for _, key in ipairs({QUEUE, WAITERS, PRESENT}) do call('PEXPIRE', key, ARRIVAL_TTL_MS) end
end

local function write_barrier()
  call('SET', RECORD, '1 barrier ' .. generation .. tail, 'PX', RECORD_TTL_MS)
  call('HSET', BARRIER, 'parties', parties, 'arrivals', arrivals, 'passed', passed, 'told', woken)
  if reason then call('HSET', BARRIER, 'why', reason) else call('HDEL', BARRIER, 'why') end
  refresh_ttls()
end

-- Returns some arrivals after the number `after`, up to `last`.
local function list_arrivals(after, last)
  return call('ZRANGEBYSCORE', QUEUE, '(' .. after, last, 'LIMIT', 0, MAX_PER_CALL)
end

local function wake_one(party)
  local channel = string.match(call('HGET', WAITERS, party) or '', '^%d+ %d+ %d (%S+)')
  if channel then publish(channel, 'granted ' .. party) end
end

-- Wakes some of the parties that passed; some of all parties if the barrier is broken.
local function wake_some()
  local last = reason and arrivals or passed
  if woken >= last then return end
  local batch = list_arrivals(woken, last)
  for _, party in ipairs(batch) do wake_one(party) end
  woken = #batch == MAX_PER_CALL and tonumber(call('ZSCORE', QUEUE, batch[MAX_PER_CALL])) or last
  call('HSET', BARRIER, 'told', woken)
end

local function break_barrier(cause)
  reason = cause
  call('DEL', PRESENT)
  call('HSET', BARRIER, 'why', reason)
  wake_some()
end

-- Breaks the barrier if a waiting party sends no heartbeats any more.
local function break_if_party_died()
  if reason or arrivals == passed then return end
  local dead = call('ZRANGEBYSCORE', PRESENT, '-inf', string.format('%.0f', get_time_us() / 1000), 'LIMIT', 0, 1)[1]
  if dead or call('ZCARD', PRESENT) < arrivals - passed then
    break_barrier('a party sends no heartbeats any more: ' .. (dead or 'the server has lost it'))
  end
end

local function mark_alive(party)
  call('ZADD', PRESENT, string.format('%.0f', get_time_us() / 1000 + LIVENESS_MS), party)
end

-- Drops some arrivals that passed long ago.
local function drop_passed()
  local now_ms = get_time_us() / 1000
  for _, party in ipairs(list_arrivals(0, passed)) do
    local alive_until = string.match(call('HGET', WAITERS, party) or '0', '^%d+')
    if alive_until + ARRIVAL_TTL_MS > now_ms then return end
    dequeue(party)
  end
end

if verb == 'acquire' then
  local handover_ttl, subscribed, channel, max_waiters = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local wanted_parties, arrived_in = tonumber(ARGV[8]), ARGV[9]
  if not read_barrier() then return {WRONG_KIND, record} end
  local arrival = generation and tonumber(call('ZSCORE', QUEUE, token) or nil)
  if arrival then  -- a second copy of the request
    refresh_ttls()  -- this first write needs no memory, so the server refuses none of the later ones
    if arrival > passed then
      if not reason then mark_alive(token) end
      break_if_party_died()
    end
    wake_some()
    if arrival <= passed then
      return {GRANTED, tonumber(string.match(call('HGET', WAITERS, token) or '', '^%d+ %d+ %d %S+ (%d+)') or 0)}
    end
    if not reason and max_waiters == '0' then break_barrier('the timeout of a party was over: ' .. token) end
    if reason then return {BROKEN, reason} end
    enqueue(token, handover_ttl, subscribed, channel, string.format(' %d', arrival - passed - 1))
    refresh_ttls()
    return {QUEUED, arrivals - passed, 1000, 0, generation}
  end
  if call('ZSCORE', TOMBSTONES, token) then return {BROKEN, 'it was reset, or this party has left'} end
  if arrived_in ~= '' and arrived_in ~= generation then
    return {BROKEN, 'it was reset, or the server has lost it'}
  end
  if not generation then
    generation, parties, arrivals, passed, woken = string.format('%.0f', get_time_us()), wanted_parties, 0, 0, 0
    call('SET', RECORD, '1 barrier ' .. generation, 'PX', RECORD_TTL_MS)
    call('DEL', BARRIER, QUEUE, WAITERS, PRESENT)
  end
  break_if_party_died()
  if reason then return {BROKEN, reason} end
  if arrived_in ~= '' then return {BROKEN, 'the server has lost the arrival of this party'} end
  if parties ~= wanted_parties and arrivals > passed then return {LIMIT_MISMATCH, parties} end
  parties = wanted_parties  -- nobody waits, so nobody relies on another number
  drop_passed()
  arrivals = arrivals + 1
  local index = arrivals - passed - 1
  write_barrier()  -- without memory this write fails, and nothing has changed
  call('ZADD', QUEUE, arrivals, token)
  enqueue(token, handover_ttl, subscribed, channel, ' ' .. index)
  if index == parties - 1 then
    call('DEL', PRESENT)
    passed = arrivals
  else
    mark_alive(token)
    if max_waiters == '0' then
      break_barrier('a party arrived that may not wait: ' .. token)
      refresh_ttls()
      return {BROKEN, reason}
    end
  end
  write_barrier()
  wake_some()
  if passed == arrivals then return {GRANTED, index} end
  return {QUEUED, index + 1, 1000, 0, generation}

elseif verb == 'release' then
  local tombstone_ttl = ARGV[3]
  if read_barrier() and generation then
    local arrival = tonumber(call('ZSCORE', QUEUE, token) or 0)
    if arrival > passed then
      if not reason then break_barrier('a party left, or its timeout was over: ' .. token) end
      dequeue(token)
    end
  end
  add_tombstone(token, tombstone_ttl)
  return {0, 0}

elseif verb == 'heartbeat' then
  read_barrier()
  -- This first write needs no memory, so the server refuses none of the later ones.
  if generation then refresh_ttls() end
  return heartbeat(
    function()
      if generation then
        for i = 4, #ARGV, 2 do
          local party = ARGV[i]
          if call('ZSCORE', PRESENT, party) then mark_alive(party) end
        end
        break_if_party_died()
        wake_some()
        refresh_ttls()
      end
      return 1000
    end,
    function(party) return not generation or reason or tonumber(call('ZSCORE', QUEUE, party) or 0) <= passed end
  )

elseif verb == 'reset' then
  if not read_barrier() then return {WRONG_KIND, record} end
  if not generation or call('ZSCORE', TOMBSTONES, token) then return {0} end
  for _, party in ipairs(list_arrivals(passed, arrivals)) do wake_one(party) end
  for _, party in ipairs(call('ZRANGEBYSCORE', QUEUE, '(' .. passed, '+inf')) do
    dequeue(party)
    -- A late copy of this party's request must not arrive in the new generation.
    redis.pcall('ZADD', TOMBSTONES, string.format('%.0f', get_time_us() / 1000 + ARRIVAL_TTL_MS), party)
  end
  call('DEL', PRESENT)
  generation = string.format('%.0f', math.max(generation + 1, get_time_us()))
  passed, woken, reason = arrivals, arrivals, nil
  tail = ''
  write_barrier()
  add_tombstone(token, tostring(ARRIVAL_TTL_MS))
  return {1}

elseif verb == 'revoke' then
  local cause = ARGV[3]
  if call('ZSCORE', TOMBSTONES, token) then return {1} end
  if not read_barrier() then return redis.error_reply('WRONGTYPE ' .. record) end
  if not generation or reason then return {0} end
  break_barrier(cause)
  add_tombstone(token, tostring(ARRIVAL_TTL_MS))
  return {1}

elseif verb == 'inspect' then
  local max_parties = ARGV[2]
  if not read_barrier() then return redis.error_reply('WRONGTYPE ' .. record) end
  if generation then
    break_if_party_died()
    wake_some()
  end
  return {generation or '', parties or 0, (arrivals or 0) - (passed or 0), reason or '',
    unpack(call('ZRANGEBYSCORE', QUEUE, '(' .. (passed or 0), '+inf', 'LIMIT', 0, max_parties))}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
