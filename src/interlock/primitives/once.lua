-- Work that runs once: a lock, and a note of the last run, which keeps the next run from starting too early.
--
-- Theory. A run holds the lock. The release of a run stores the note, whose TTL ends when the next run may start. While
-- the note exists, acquire grants nothing.
--
-- KEYS   1 lock     string  as in lock.lua, like the next four
--        2 record   string  as in lock.lua
--        3 queue    zset    as in lock.lua
--        4 waiters  hash    as in lock.lua
--        5 gone     zset    as in lock.lua
--        6 done     string  the note: "<token> <started, µs> <ended, µs>" of the last run. A run never ends before it
--                           started, even if another server noted the start
--        ... for `renew`: lock, record, lock, record, ... of many instead; for `execute`: its keys follow
--        ... and last, in a quorum: voter, of the voter record, see message.lua
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply. As in lock.lua, except:
--   acquire  token  ttl ms  handover ttl ms  subscribed 0|1  channel  max waiters  owner  kind
--                             RETURN as in lock.lua | {WRONG_KIND, note}
--                                  | {BUSY, token of the run, ms until the next run may start, 0, started µs,
--                                     ended µs | "0" while the run goes on}
--   release  token  tombstone ttl ms  at least ms  keep ms
--                             the next run may start `at least` ms after the start of this run; and, unless the run was
--                             revoked, `keep` ms after its end
--   heartbeat  channel  subscribed 0|1  (token  handover ttl ms)...
--   renew    (token  ttl ms)...
--   regrant  token  ttl ms  fence  abstention  kind  channel
--   voter                     RETURN as in lock.lua
--   reserve  token  ttl ms  number
--   execute  token  command  argument...
--   fence    token  fence
--   revoke   token  force 0|1  why
--   keys     command  argument...
--   inspect  max waiters      RETURN {the reply of lock.lua, note | "", its pttl ms}
--   forget   note             RETURN {done 0|1}   not done: the note is gone, or another run has stored one

--function lock

local verb, token, LOCK, RECORD, NOTE = ARGV[1], ARGV[2], KEYS[1], KEYS[2], KEYS[6]
local BUSY, WRONG_KIND = 3, 8

local function read_start()
  return string.match(redis.call('GET', RECORD) or '', '^1 once (%d+)') or '0'
end

if verb == 'acquire' then
  local note = redis.call('GET', NOTE)
  if note then
    local runner, started_us, ended_us = string.match(note, '^(%S+) (%d+) (%d+)')
    if not runner then return {WRONG_KIND, note} end
    return {BUSY, runner, redis.call('PTTL', NOTE), 0, started_us, ended_us}
  end
  local reply = lock(KEYS, ARGV)
  if reply[1] == BUSY then
    reply[5], reply[6] = read_start(), '0'
  end
  return reply

elseif verb == 'release' then
  local at_least_ms, keep_ms = ARGV[4], ARGV[5]
  local holder = redis.call('GET', LOCK)
  if holder == token or holder == '!' .. token then  -- a revoked run counts as a failed run
    local time = redis.call('TIME')
    local started_us = tonumber(read_start())
    -- Another server, whose clock was ahead, may have noted the start.
    local now_us = math.max(started_us, time[1] * 1000000 + time[2])
    local at_least_left_ms = at_least_ms - (now_us - started_us) / 1000
    local note_ttl_ms = math.ceil(math.max(at_least_left_ms, holder == token and tonumber(keep_ms) or 0))
    -- The note is the first write: without memory this write fails, nothing is released, and the client sends the
    -- release again.
    if note_ttl_ms > 0 then
      redis.call('SET', NOTE, string.format('%s %.0f %.0f', token, started_us, now_us), 'PX',
        string.format('%.0f', note_ttl_ms))
    end
  end
  return lock(KEYS, ARGV)

elseif verb == 'inspect' then
  return {lock(KEYS, ARGV), redis.call('GET', NOTE) or '', redis.call('PTTL', NOTE)}

elseif verb == 'forget' then
  local seen_note = ARGV[2]
  local is_same_note = redis.call('GET', NOTE) == seen_note  -- a late copy of the message must not forget the next run
  if is_same_note then redis.call('DEL', NOTE) end
  return {is_same_note and 1 or 0}
end
return lock(KEYS, ARGV)
