-- An election: a lock whose holder leads, and watchers who learn who leads.
--
-- Theory. The fence of the lock is the term. After a verb of lock.lua has changed who leads, the script notifies the
-- watchers whose knowledge is older, a bounded number in one call. A notified watcher asks again, which stores what it
-- knows now and notifies more watchers. A watcher whose notification got lost asks again by itself.
--
-- KEYS   1 lock     string  as in lock.lua, like the next four
--        2 record   string  as in lock.lua
--        3 queue    zset    as in lock.lua
--        4 waiters  hash    as in lock.lua
--        5 gone     zset    as in lock.lua
--        6 watchers zset    "<channel> <token>" -> the version that the watcher knows: twice the term, plus 1 if
--                           nobody led
--        ... for `renew`: lock, record, lock, record, ... of many instead; for `execute`: its keys follow
--        ... and last, in a quorum: voter, of the voter record, see message.lua
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply. As in lock.lua, and:
--   watch    token  channel   RETURN {GRANTED, leader | "", pttl ms, term} | {WRONG_KIND, record}
--   acquire  token  ttl ms  handover ttl ms  subscribed 0|1  channel  max waiters  owner  kind
--   release  token  tombstone ttl ms
--   heartbeat  channel  subscribed 0|1  (token  handover ttl ms)...
--   renew    (token  ttl ms)...
--   regrant  token  ttl ms  fence  abstention  kind  channel
--   voter                     RETURN as in lock.lua
--   reserve  token  ttl ms  number
--   execute  token  command  argument...
--   fence    token  fence
--   revoke   token  force 0|1  why
--   keys     command  argument...
--   inspect  max waiters

--function lock

local verb, LOCK, RECORD, WATCHERS = ARGV[1], KEYS[1], KEYS[2], KEYS[6]
local GRANTED, WRONG_KIND, MAX_NOTIFIED, MAX_WATCHERS, WATCHERS_TTL_MS = 1, 8, 32, 10000, 10000

if verb == 'renew' or verb == 'keys' then return lock(KEYS, ARGV) end
local reply = verb ~= 'watch' and lock(KEYS, ARGV)
if reply and redis.call('EXISTS', WATCHERS) == 0 then return reply end

local record = redis.call('GET', RECORD)
local kind, term = string.match(record or '1 election 0 - -', '^1 (%a+) (%d+)')
if kind ~= 'election' and kind ~= 'unknown' then return reply or {WRONG_KIND, record} end
local leader = redis.call('GET', LOCK)
local version = string.format('%.0f', term * 2 + (leader and 0 or 1))
if verb == 'watch' then
  local token, channel = ARGV[2], ARGV[3]
  -- Either most of these watchers have died, or they are too many to notify. The live ones ask again by themselves.
  if redis.call('ZCARD', WATCHERS) >= MAX_WATCHERS then redis.call('DEL', WATCHERS) end
  redis.call('ZADD', WATCHERS, version, channel .. ' ' .. token)
  redis.call('PEXPIRE', WATCHERS, WATCHERS_TTL_MS)
  reply = {GRANTED, leader or '', redis.call('PTTL', LOCK), tonumber(term)}
end
for _, watcher in ipairs(redis.call('ZRANGEBYSCORE', WATCHERS, '-inf', '(' .. version, 'LIMIT', 0, MAX_NOTIFIED)) do
  local channel, token = string.match(watcher, '^(%S+) (%S+)')
  redis.call('ZREM', WATCHERS, watcher)
  redis.pcall(string.find(channel, '{', 1, true) and 'SPUBLISH' or 'PUBLISH', channel, 'granted ' .. token)
end
return reply
