-- The barrier: so many parties wait for each other, and go on together; again and again.
--
-- Theory. Arrivals are numbered. Those up to `passed` went through; when `parties` more have come, they pass as well. An
-- arrival stays known for a while after that, so that one whose answer was lost hears that it passed, and is not
-- taken for another arrival. Who waits vouches for itself; whoever comes and finds one that no longer does
-- breaks the barrier, and so does one that leaves. It stays broken until it is reset, which begins another
-- generation. Who is to be told of either is woken a bounded number in one step, in order of arrival (`told`); each
-- that comes back goes on with it, and one whose message is lost finds out with its next vouch.
--
-- KEYS   1 barrier  hash     parties, arrivals, passed, told, why (it is broken)
--        2 record   string  "1 barrier <generation>"
--        3 queue    zset    token of an arrival -> its number
--        4 waiters  hash    as in queue.lua; it "wants" its index
--        5 gone     zset    also those whom a reset sent away, and the operations that were done
--        6 present  zset    token of who waits -> alive until, ms
-- ARGV   1 verb, then
--   acquire  token  ttl ms  life ms  heard 0|1  channel  wait 0|1  parties  generation
--                             `generation`: in which it has arrived already, or ""
--                             RETURN {GRANTED, index} | {QUEUED, arrived, 1000, 0, generation}
--                                  | {BROKEN, why} | {LIMIT_MISMATCH, parties} | {WRONG_KIND, record}
--   release  token  gone ms   RETURN {0, 0}     one that waits breaks it by this
--   vouch    channel  heard 0|1  (token  life ms)...
--                             RETURN {1000, head's token | "", state...}
--   reset    operation        RETURN {done 0|1} | {WRONG_KIND, record}     once for each operation
--   revoke   operation  why   RETURN {done 0|1}   not done: it is broken, or there is none     once for each operation
--   inspect  most             RETURN {generation | "", parties, arrived, why | "", token...}

--include queue

local BARRIER, PRESENT = KEYS[1], KEYS[6]
local BROKEN, ARRIVAL_TTL_MS = 10, 60000
local generation, record, parties, arrivals, passed, woken, reason
local tail = ''  -- what follows the words of the record that this version knows

-- Whether there is none, or one that is ours to read: then the variables above are its own.
local function read_barrier()
  record = call('GET', RECORD)
  local stored_generation, text = string.match((record or '') .. ' ', '^1 barrier (%d+)( .*)')
  if record and not stored_generation then return false end
  local stored = call('HMGET', BARRIER, 'parties', 'arrivals', 'passed', 'told', 'why')
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

-- Those who came after this number, up to that one: some of them.
local function list_arrivals(after, last)
  return call('ZRANGEBYSCORE', QUEUE, '(' .. after, last, 'LIMIT', 0, MAX_PER_CALL)
end

local function wake_one(party)
  local channel = string.match(call('HGET', WAITERS, party) or '', '^%d+ %d+ %d (%S+)')
  if channel then publish(channel, 'granted ' .. party) end
end

-- Go on with telling those who passed, or everybody if it is broken.
local function wake_some()
  local last = reason and arrivals or passed
  if woken >= last then return end
  local found = list_arrivals(woken, last)
  for _, party in ipairs(found) do wake_one(party) end
  woken = #found == MAX_PER_CALL and tonumber(call('ZSCORE', QUEUE, found[MAX_PER_CALL])) or last
  call('HSET', BARRIER, 'told', woken)
end

local function break_barrier(cause)
  reason = cause
  call('DEL', PRESENT)
  call('HSET', BARRIER, 'why', reason)
  wake_some()
end

-- Break it if somebody who waits is not heard of any more.
local function break_if_party_died()
  if reason or arrivals == passed then return end
  local dead = call('ZRANGEBYSCORE', PRESENT, '-inf', string.format('%.0f', get_time_us() / 1000), 'LIMIT', 0, 1)[1]
  if dead or call('ZCARD', PRESENT) < arrivals - passed then
    break_barrier('a party is not heard of any more: ' .. (dead or 'the server has lost it'))
  end
end

local function mark_alive(party)
  call('ZADD', PRESENT, string.format('%.0f', get_time_us() / 1000 + LIVENESS_MS), party)
end

-- Forget some of those who passed long ago.
local function forget_passed()
  local now_ms = get_time_us() / 1000
  for _, party in ipairs(list_arrivals(0, passed)) do
    local alive_until = string.match(call('HGET', WAITERS, party) or '0', '^%d+')
    if alive_until + ARRIVAL_TTL_MS > now_ms then return end
    dequeue(party)
  end
end

if verb == 'acquire' then
  local handover_ttl, subscribed, channel, may_wait = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local wanted_parties, arrived_in = tonumber(ARGV[8]), ARGV[9]
  if not read_barrier() then return {WRONG_KIND, record} end
  local arrival = generation and tonumber(call('ZSCORE', QUEUE, token) or nil)
  if arrival then  -- the same request again
    refresh_ttls()  -- before the first write: one that is here already needs no memory
    if arrival > passed then
      if not reason then mark_alive(token) end
      break_if_party_died()
    end
    wake_some()
    if arrival <= passed then
      return {GRANTED, tonumber(string.match(call('HGET', WAITERS, token) or '', '^%d+ %d+ %d %S+ (%d+)') or 0)}
    end
    if not reason and may_wait ~= '1' then break_barrier('the time of a party was over: ' .. token) end
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
  if arrived_in ~= '' then return {BROKEN, 'the server does not know any more that this party came'} end
  if parties ~= wanted_parties and arrivals > passed then return {LIMIT_MISMATCH, parties} end
  parties = wanted_parties  -- nobody waits, so nobody counts on another number
  forget_passed()
  arrivals = arrivals + 1
  local index = arrivals - passed - 1
  write_barrier()  -- if there is no memory, this fails, and nothing was done
  call('ZADD', QUEUE, arrivals, token)
  enqueue(token, handover_ttl, subscribed, channel, ' ' .. index)
  if index == parties - 1 then
    call('DEL', PRESENT)
    passed = arrivals
  else
    mark_alive(token)
    if may_wait ~= '1' then
      break_barrier('a party came that could not wait: ' .. token)
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
      if not reason then break_barrier('a party left, or its time was over: ' .. token) end
      dequeue(token)
    end
  end
  add_tombstone(token, tombstone_ttl)
  return {0, 0}

elseif verb == 'vouch' then
  read_barrier()
  if generation then refresh_ttls() end  -- before the first write: who waits already needs no memory
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
    -- A late copy is no arrival.
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
  if not read_barrier() or not generation or reason then return {0} end
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
