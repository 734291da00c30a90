-- The registry: what the processes hold and wait for, as they say themselves. For people: no decision reads it.
--
-- Theory. A session writes one entry under the name of its process, when something has changed and from time to time.
-- An index names the processes that have entries, so nobody ever has to scan the keys of the server. A process that
-- dies writes no more, and its entry lasts as long as its TTL says: people can read where its code was.
--
-- KEYS   1 index     zset    process -> until when its entries last, ms
--        2 [entries] hash    session -> "<written, ms> <entry>"; the entry is JSON, see registry.py
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply
--   report  process  session  ttl ms  entry   RETURN {1}
--   leave   process  session                  RETURN {1}
--   list    most                              RETURN {now ms, process...}
--   read                                      RETURN {now ms, session, "<written, ms> <entry>", ...}
--
-- Every time is one of the server's clock.

local verb = ARGV[1]
local INDEX, ENTRIES = KEYS[1], KEYS[2]
local MAX_SESSIONS = 256  -- entries of one process that are kept: a read of them blocks the server for a moment
local MANY_SESSIONS = 16  -- entries of one process from which on a new one may delete those whose time is over
local CLEAN_UP = 16  -- one in so many new entries does, since it reads them all

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function text(number)
  return string.format('%.0f', number)
end

if verb == 'report' then
  local process, session, ttl_ms, entry = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
  if redis.call('HLEN', ENTRIES) >= MANY_SESSIONS and not redis.call('HGET', ENTRIES, session) then
    if now_ms % CLEAN_UP == 0 then
      local stored = redis.call('HGETALL', ENTRIES)
      for i = 1, #stored, 2 do
        local written_ms = tonumber(string.match(stored[i + 1], '^%d+')) or 0
        if written_ms + ttl_ms < now_ms then redis.call('HDEL', ENTRIES, stored[i]) end
      end
    end
    if redis.call('HLEN', ENTRIES) >= MAX_SESSIONS then return {1} end
  end
  -- First what may fail: the key of the index holds something else, or there is no memory. Then nothing is stored.
  redis.call('ZADD', INDEX, text(now_ms + ttl_ms), process)
  redis.call('ZREMRANGEBYSCORE', INDEX, '-inf', text(now_ms))
  redis.call('PEXPIRE', INDEX, text(ttl_ms))
  redis.call('HSET', ENTRIES, session, text(now_ms) .. ' ' .. entry)
  redis.call('PEXPIRE', ENTRIES, text(ttl_ms))
  return {1}

elseif verb == 'leave' then
  local process, session = ARGV[2], ARGV[3]
  redis.call('HDEL', ENTRIES, session)
  if redis.call('EXISTS', ENTRIES) == 0 then redis.call('ZREM', INDEX, process) end
  return {1}

elseif verb == 'list' then
  local most = ARGV[2]
  local reply = redis.call('ZRANGEBYSCORE', INDEX, text(now_ms), '+inf', 'LIMIT', '0', most)
  table.insert(reply, 1, now_ms)
  return reply

elseif verb == 'read' then
  local reply = redis.call('HGETALL', ENTRIES)
  table.insert(reply, 1, now_ms)
  return reply
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
