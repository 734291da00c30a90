-- An election: a lock whose holder leads, and those who watch who that is.
--
-- Theory. The fence of the lock is the term. Whatever a verb of lock.lua did, if it changed who leads, then the watchers
-- that know less are told, a bounded number in one step; each comes to look, stands among the watchers again with
-- what it knows then, and so goes on with the telling. One whose message is lost looks again by itself.
--
-- KEYS   1 lock     string  as in lock.lua, and so are the next four
--        2 record   string
--        3 queue    zset
--        4 waiters  hash
--        5 gone     zset
--        6 watchers zset    "<channel> <token>" -> what it knows: twice the term, and 1 more if nobody leads now
--        ... for `renew`: lock, record, lock, record, ... of many instead; for `execute`: its keys follow
-- ARGV   1 verb, then as in lock.lua; and
--   watch    token  channel   RETURN {GRANTED, leader | "", pttl ms, term} | {WRONG_KIND, record}
--   acquire  token  ttl ms  life ms  heard 0|1  channel  wait 0|1  owner  kind
--   release  token  gone ms
--   vouch    channel  heard 0|1  (token  life ms)...
--   renew    (token  ttl ms)...
--   execute  token  command  argument...
--   fence    token  fence
--   revoke   token  force 0|1  why
--   keys     command  argument...
--   inspect  most waiters

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
  -- So many have never come again, or are too many for pushes: who lives comes again by itself.
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
