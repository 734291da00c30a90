-- The latch: a count that goes down to zero, once; then every waiter goes on, and so does every later caller.
--
-- Theory. The first caller, whether it waits or counts, creates the latch. Waiters stand in the queue. Once the latch
-- is open, each script call wakes a bounded number of them; each woken waiter asks again, goes on, and thereby wakes
-- more. A waiter whose push got lost learns that the latch is open from its next heartbeat. Each latch has a
-- generation. A waiter names the generation in which it waits, so that it gets BROKEN once that latch is gone, and does
-- not keep another latch of the same name alive. A caller with another count than the latch has, open or not, gets
-- LIMIT_MISMATCH, and changes nothing: else it would pass a latch that others have counted down less often.
--
-- KEYS   1 latch    hash     count; left; keep: ms for which the latch outlives its last caller; why: the reason of a
--                           revocation
--        2 record   string  "1 latch <generation>"
--        3 queue    zset    as in queue.lua
--        4 waiters  hash    as in queue.lua
--        5 gone     zset    as in queue.lua; also the operations that were done
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply
--   acquire  token  ttl ms  handover ttl ms  subscribed 0|1  channel  max waiters  count  keep ms  generation
--                             max waiters: "0": the caller does not wait; else "inf"
--                             RETURN {GRANTED} | {QUEUED | BUSY, left, 1000, 0, generation} | {NOT_FOUND}
--                                  | {BROKEN, why} | {LIMIT_MISMATCH, count} | {WRONG_KIND, record}
--                             generation: in which the caller waits already, or ""
--                             NOT_FOUND: the token has a tombstone
--   release  token  tombstone ttl ms
--                             RETURN {0, 0}
--                             takes a waiter out of the queue
--   heartbeat  channel  subscribed 0|1  (token  handover ttl ms)...
--                             RETURN {1000, head's token | "", state...}
--   count    operation  by  count  keep ms
--                             RETURN {GRANTED, left} | {BROKEN, why} | {LIMIT_MISMATCH, count} | {WRONG_KIND, record}
--                             runs once for each operation
--   revoke   operation  why   RETURN {done 0|1}
--                             runs once for each operation; not done: the latch is open, or there is none
--   inspect  max waiters      RETURN {generation | "", count, left, pttl ms, why | "", number of waiters, token...}

--include message
--include queue

local LATCH = KEYS[1]
-- BROKEN: a reply code, as in message.lua. OPERATION_TTL_MS: how long the script remembers an operation.
local BROKEN, OPERATION_TTL_MS = 10, 60000
local generation, record, left, keep_ms, reason, counts_from

-- Reads the latch into the variables above. Returns false if another version or another kind of primitive owns the
-- record, or if the key is a hash of somebody else, which a latch would delete: then there is no record.
local function read_latch()
  record = call('GET', RECORD)
  local stored_generation = record and string.match(record .. ' ', '^1 latch (%d+) ')
  if record and not stored_generation then return false end
  local stored = call('HMGET', LATCH, 'left', 'keep', 'why', 'count')
  if not record and not stored[1] and call('PTTL', LATCH) ~= -2 then
    record = ''
    return false
  end
  if record and stored[1] then
    generation, left, keep_ms, reason = stored_generation, tonumber(stored[1]), stored[2], stored[3]
    counts_from = tonumber(stored[4])
  end
  return true
end

local function refresh_ttl()
  call('PEXPIRE', LATCH, keep_ms)
  call('PEXPIRE', RECORD, keep_ms)
end

-- Creates the latch unless there is one. Waiters of an earlier latch learn from their next heartbeat that their latch
-- is gone.
local function create_if_absent(count, requested_keep_ms)
  if left then return end
  keep_ms, left, generation = requested_keep_ms, tonumber(count), string.format('%.0f', get_time_us())
  call('SET', RECORD, '1 latch ' .. generation, 'PX', keep_ms)
  call('DEL', LATCH, QUEUE, WAITERS)
  call('HSET', LATCH, 'count', count, 'left', count, 'keep', keep_ms)
  refresh_ttl()
end

-- The reply to a caller with another count than the latch has; nil if the caller has the same, or there is no latch.
local function mismatch(count)
  if left and not reason and counts_from ~= tonumber(count) then return {LIMIT_MISMATCH, counts_from} end
end

local function is_over()
  return not left or left == 0 or reason
end

-- Wakes some of the waiters, if they have nothing to wait for any more.
local function wake_some()
  if not is_over() then return end
  for _, waiter in ipairs(call('ZRANGE', QUEUE, 0, MAX_PER_CALL - 1)) do
    local channel = string.match(call('HGET', WAITERS, waiter) or '', '^%d+ %d+ %d (%S+)')
    dequeue(waiter)
    if channel then publish(channel, 'granted ' .. waiter) end
  end
end

if verb == 'acquire' then
  local handover_ttl, subscribed, channel, max_waiters, count, requested_keep_ms, waiting_in =
    ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
  if not read_latch() then return {WRONG_KIND, record} end
  if call('ZSCORE', TOMBSTONES, token) then return {NOT_FOUND} end
  if waiting_in ~= '' and waiting_in ~= generation then
    return {BROKEN, 'it is gone from the server: its ttl has passed, or the server has lost it'}
  end
  local refusal = mismatch(count)
  if refusal then return refusal end
  create_if_absent(count, requested_keep_ms)
  refresh_ttl()
  if is_over() then
    dequeue(token)
    wake_some()
    return reason and {BROKEN, reason} or {GRANTED}
  end
  if max_waiters == '0' then return {BUSY, left, 1000, 0, generation} end
  enqueue(token, handover_ttl, subscribed, channel, '')
  return {QUEUED, left, 1000, 0, generation}

elseif verb == 'release' then
  local tombstone_ttl = ARGV[3]
  dequeue(token)
  add_tombstone(token, tombstone_ttl)
  return {0, 0}

elseif verb == 'heartbeat' then
  local is_ours = read_latch()
  if left then refresh_ttl() end  -- this first write needs no memory, so the server refuses none of the later ones
  return heartbeat(
    function()
      if is_ours then wake_some() end  -- else the waiters belong to another primitive, which owns the name now
      return 1000
    end,
    is_over
  )

elseif verb == 'count' then
  local by, count, requested_keep_ms = ARGV[3], ARGV[4], ARGV[5]
  if not read_latch() then return {WRONG_KIND, record} end
  local was_counted = call('ZSCORE', TOMBSTONES, token)
  if not was_counted then
    local refusal = mismatch(count)
    if refusal then return refusal end
    create_if_absent(count, requested_keep_ms)
    refresh_ttl()
    if reason then return {BROKEN, reason} end
    left = math.max(0, left - by)
    call('HSET', LATCH, 'left', left)
    add_tombstone(token, tostring(OPERATION_TTL_MS))
    wake_some()
  end
  return {GRANTED, left or 0}

elseif verb == 'revoke' then
  local new_reason = ARGV[3]
  if call('ZSCORE', TOMBSTONES, token) then return {1} end
  if not read_latch() then return redis.error_reply('WRONGTYPE ' .. record) end
  if is_over() then return {0} end
  reason = new_reason
  call('HSET', LATCH, 'why', reason)
  add_tombstone(token, tostring(OPERATION_TTL_MS))
  wake_some()
  return {1}

elseif verb == 'inspect' then
  local max_waiters = ARGV[2]
  if not read_latch() then return redis.error_reply('WRONGTYPE ' .. record) end
  local handed_over = {}  -- a latch has no holder
  --include living
  return {generation or '', tonumber(call('HGET', LATCH, 'count') or 0), left or 0, call('PTTL', LATCH), reason or '',
    waiting, unpack(waiters)}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
