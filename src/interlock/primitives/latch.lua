-- The latch: a count that goes down to nothing, once; then all who wait, and all who come later, go on.
--
-- Theory. Whoever comes first, to wait or to count, makes it. Who waits stands in the queue, of which a bounded number is
-- woken in one step once the latch is open; each comes back, is let through, and goes on with the waking. One whose
-- message is lost finds out with its next vouch. Each latch is a generation: a waiter says in which one it
-- waits, so that it is told if that one is gone, and can't be kept by another one of the same name.
--
-- KEYS   1 latch    hash     count, left, keep (ms that it lives when nobody comes), why (it was revoked)
--        2 record   string  "1 latch <generation>"
--        3 queue    zset    as in queue.lua
--        4 waiters  hash
--        5 gone     zset    also the operations that were done
-- ARGV   1 verb, then
--   acquire  token  ttl ms  life ms  heard 0|1  channel  wait 0|1  count  keep ms  generation
--                             `generation`: in which it waits already, or ""
--                             RETURN {GRANTED} | {QUEUED | BUSY, left, 1000, 0, generation} | {GONE} | {BROKEN, why}
--                                  | {MISUSED, record}
--   release  token  gone ms   RETURN {0, 0}     takes a waiter out of the queue
--   vouch    channel  heard 0|1  (token  life ms)...
--                             RETURN {1000, head's token | "", state...}
--   count    operation  by  count  keep ms
--                             RETURN {GRANTED, left} | {BROKEN, why} | {MISUSED, record}    once for each operation
--   revoke   operation  why   RETURN {done 0|1}   not done: it is open, or there is none     once for each operation
--   inspect  most             RETURN {generation | "", count, left, pttl ms, why | "", number of waiters, token...}

--include queue

local LATCH = KEYS[1]
local BROKEN, DONE_MS = 10, 60000
local generation, text, left, keep, why

-- Whether there is none, or one that is ours to read: then generation, left, keep and why are its own.
local function read()
  text = call('GET', RECORD)
  local number = text and string.match(text .. ' ', '^1 latch (%d+) ')
  if text and not number then return false end
  local stored = call('HMGET', LATCH, 'left', 'keep', 'why')
  if text and stored[1] then
    generation, left, keep, why = number, tonumber(stored[1]), stored[2], stored[3]
  end
  return true
end

-- It lives for as long after this as was asked for.
local function touch()
  call('PEXPIRE', LATCH, keep)
  call('PEXPIRE', RECORD, keep)
end

-- Make it, unless there is one. Those who waited in another one learn from their next vouch that it is gone.
local function make(count, ms)
  if left then return end
  keep, left, generation = ms, tonumber(count), string.format('%.0f', micros())
  call('SET', RECORD, '1 latch ' .. generation, 'PX', keep)
  call('DEL', LATCH, QUEUE, WAITERS)
  call('HSET', LATCH, 'count', count, 'left', count, 'keep', keep)
  touch()
end

local function over()
  return not left or left == 0 or why
end

-- Wake some of those who wait for nothing any more.
local function wake()
  if not over() then return end
  for _, who in ipairs(call('ZRANGE', QUEUE, 0, SKIP - 1)) do
    local channel = string.match(call('HGET', WAITERS, who) or '', '^%d+ %d+ %d (%S+)')
    leave(who)
    if channel then tell(channel, 'granted ' .. who) end
  end
end

if verb == 'acquire' then
  local life, heard, channel, wait, count, ms, waits_in =
    ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
  if not read() then return {MISUSED, text} end
  if call('ZSCORE', GONES, token) then return {GONE} end
  if waits_in ~= '' and waits_in ~= generation then
    return {BROKEN, 'it is gone from the server: its ttl has passed, or the server has lost it'}
  end
  make(count, ms)
  touch()
  if over() then
    leave(token)
    wake()
    return why and {BROKEN, why} or {GRANTED}
  end
  if wait ~= '1' then return {BUSY, left, 1000, 0, generation} end
  enqueue(token, life, heard, channel)
  return {QUEUED, left, 1000, 0, generation}

elseif verb == 'release' then
  leave(token)
  bury(token, ARGV[3])
  return {0, 0}

elseif verb == 'vouch' then
  local ours = read()
  if left then touch() end  -- before the first write: who waits already needs no memory
  return vouch(
    function()
      if ours then wake() end  -- else they are the waiters of something else that has the name now
      return 1000
    end,
    over
  )

elseif verb == 'count' then
  local by, count, ms = ARGV[3], ARGV[4], ARGV[5]
  if not read() then return {MISUSED, text} end
  local before = call('ZSCORE', GONES, token)
  if not before then
    make(count, ms)
    touch()
    if why then return {BROKEN, why} end
    left = math.max(0, left - by)
    call('HSET', LATCH, 'left', left)
    bury(token, tostring(DONE_MS))
    wake()
  end
  return {GRANTED, left or 0}

elseif verb == 'revoke' then
  if call('ZSCORE', GONES, token) then return {1} end
  if not read() or over() then return {0} end
  why = ARGV[3]
  call('HSET', LATCH, 'why', why)
  bury(token, tostring(DONE_MS))
  wake()
  return {1}

elseif verb == 'inspect' then
  if not read() then return redis.error_reply('WRONGTYPE ' .. text) end
  return {generation or '', tonumber(call('HGET', LATCH, 'count') or 0), left or 0, call('PTTL', LATCH), why or '',
    call('ZCARD', QUEUE), unpack(call('ZRANGE', QUEUE, 0, ARGV[2] - 1))}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
