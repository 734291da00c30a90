-- Work that runs once: a lock, and a note of who has done it, for as long as nobody is to do it again.
--
-- KEYS   1 lock     string  as in lock.lua, and so are the next four
--        2 record   string
--        3 queue    zset
--        4 waiters  hash
--        5 gone     zset
--        6 done     string  "<token> <started, µs> <ended, µs>" of the last run: it lives until the next one may be;
--                           a run never ends before it began, though its server may have been replaced meanwhile
--        ... for `renew`: lock, record, lock, record, ... of many instead; for `execute`: its keys follow
-- ARGV   1 verb, then as in lock.lua; and
--   acquire  token  ttl ms  life ms  heard 0|1  channel  wait 0|1  owner  kind
--                             RETURN ... | {BUSY, who, ms until the next may be, 0, started µs, ended µs | "0"}
--                                  | {WRONG_KIND, done}
--   release  token  gone ms  at least ms  keep ms
--                             the next may start so long after the start of this one, and so long after its end
--   vouch    channel  heard 0|1  (token  life ms)...
--   renew    (token  ttl ms)...
--   execute  token  command  argument...
--   fence    token  fence
--   revoke   token  force 0|1  why
--   keys     command  argument...
--   inspect  most waiters     RETURN {the reply of lock.lua, done | "", its pttl ms}
--   forget   note             RETURN {done 0|1}   not done: that note is gone, or there is another one

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
  if holder == token or holder == '!' .. token then  -- one that was revoked has run, too, though to no good end
    local time = redis.call('TIME')
    local started_us = tonumber(read_start())
    local now_us = math.max(started_us, time[1] * 1000000 + time[2])  -- another server may have noted the start, with a clock ahead
    local at_least_left_ms = at_least_ms - (now_us - started_us) / 1000
    local note_ttl_ms = math.ceil(math.max(at_least_left_ms, holder == token and tonumber(keep_ms) or 0))
    -- The note first: if the server has no memory for it, then nothing is released, and who releases comes again.
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
  local is_same_note = redis.call('GET', NOTE) == seen_note  -- a late copy must not forget the next run
  if is_same_note then redis.call('DEL', NOTE) end
  return {is_same_note and 1 or 0}
end
return lock(KEYS, ARGV)
