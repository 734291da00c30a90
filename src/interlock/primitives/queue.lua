-- The queue that every waiting primitive shares: included at the head of its script. Who waits stands in a sorted set,
-- by arrival; who of them lives and can be woken is in a hash.
--
--   KEYS[3] queue    zset  token of a waiter -> number of arrival
--   KEYS[4] waiters  hash  token of a waiter -> "<alive until, ms> <life, ms> <heard 0|1> <channel>[ <what it wants>]"
--   KEYS[5] gone     zset  token that left in doubt -> forget after, ms: a late acquire of it takes nothing
--
-- A script that includes this decides who may hold: it asks turn() whose turn it is, grants, and wakes with push().
--
-- Wire format (ADR 10). The scripts store texts of words, one space apart: records, waiters, shares, notes. The words
-- that a header names keep their places for ever. A later version may add words after them, but before the free text,
-- which comes last and begins with " !". A script passes over words that it does not know, and keeps them when it changes
-- a text; only a text that begins anew (for another grant or generation) begins without them. A change that older
-- versions may not ignore raises the number before the record: a script refuses any other number than its own.

--   ARGV[#ARGV] epoch  "" | "<identity> <since> <wait> <former> [<fine>...]", see barred(). With "+" for the first
--                      space, or alone, this is one server of a quorum. The connection adds it to every message, so
--                      no header names it.

local GRANTED, QUEUED, BUSY, AGAIN, GONE, REVOKED, FOREIGN, MISUSED, LIMIT = 1, 2, 3, 4, 5, 6, 7, 8, 9
local EPOCH = table.remove(ARGV)
local IDENTITY = #EPOCH < 25 and '-' or string.sub(EPOCH, 1, 25)  -- of this server: under it is granted now
local COUNTS = EPOCH == '+' or string.byte(EPOCH, 26) == 43  -- whether it is one of a quorum
local RECORD_MS, QUEUE_MS, ALIVE_MS, SKIP = 300000, 10000, 3000, 32
local LOOKS, LOOK, MUTES = 500, 100, 64  -- waiters that a script call looks at; that are read at once; that can't be woken
local RECORD, QUEUE, WAITERS, GONES = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local MORE = -3  -- in place of a pttl: there are more dead waiters than one script call drops, come again at once
local call, verb, token = redis.call, ARGV[1], ARGV[2]

local function micros()
  local t = call('TIME')
  return t[1] * 1000000 + t[2]
end

-- For how many ms nothing may be granted here, since leases that this server does not know may be alive; and the
-- evidence: the identity of the one before, with that of this one and since when it is known, so that clients that come
-- later, and know only when they met it themselves, wait no longer. A record says under which identity of the server was
-- granted last; another one is here since a restart or a failover, which may have lost what was granted in between.
-- `since` (ms) on this server's clock is when that was at the latest, `wait` (ms) the longest that a lease of before may
-- last; `former` is the identity that the client knew before, or "-": evidence for what has no record. Records of `fine`
-- identities came without loss: all, or with "/<least ttl ms>" those of leases with that ttl or a longer one.
local function barred(recorded, ttl)
  if IDENTITY == '-' or recorded == IDENTITY then return 0 end
  local since, wait, former, fine = string.match(EPOCH, '(%d+) (%d+) (%S+) ?(.*)', 27)
  if not recorded or recorded == '-' then recorded = former end
  if recorded == '-' then return 0 end
  local evidence, here, known = string.match(recorded, '^([^>]*)>([^>]*)>(%d+)')
  if here == IDENTITY then since = math.min(since, known) end
  recorded = evidence or recorded
  for each, least in string.gmatch(fine, '([^ /]+)/?(%d*)') do
    if string.sub(recorded, 1, #each) == each and (tonumber(least) or 0) <= tonumber(ttl or 0) then return 0 end
  end
  local ms = math.max(0, math.ceil(since + math.max(wait, ttl or 0) - micros() / 1000))
  return ms, string.format('%s>%s>%.0f', recorded, IDENTITY, since)
end

-- The next fence after this one, and by how many ms it is ahead of the clock. The clock makes good for grants that the
-- server has lost. In a quorum they are agreed on by counting, so that servers answer alike; unless this one may have lost
-- some.
local function next_fence(fence, recorded)
  local now = micros()
  local following = COUNTS and fence > 0 and recorded == IDENTITY and fence + 1 or math.max(fence + 1, now)
  return following, math.max(0, math.ceil((following - now) / 1000))
end

-- Splits the rest of a stored text, after the words that this version knows: into the words of a later version, each
-- after its space, and the free text, or nil.
local function parted(rest)
  if rest == '' then return '' end
  local at = string.find(rest, ' !', 1, true)
  if not at then return rest end
  return string.sub(rest, 1, at - 1), string.sub(rest, at + 2)
end

local function leave(who)
  call('ZREM', QUEUE, who)
  call('HDEL', WAITERS, who)
end

-- Stand in the queue, or stay there, and be alive.
local function enqueue(who, life, heard, channel, wants)
  local alive = micros() / 1000 + ALIVE_MS
  call('PEXPIRE', QUEUE, QUEUE_MS)  -- before the first write: who has no right to it leaves nothing
  if not call('ZSCORE', QUEUE, who) then
    local newest = call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0
    call('ZADD', QUEUE, string.format('%.0f', newest + 1), who)
    call('PEXPIRE', QUEUE, QUEUE_MS)
  end
  call('HSET', WAITERS, who, string.format('%.0f %s %s %s%s', alive, life, heard, channel, wants or ''))
  call('PEXPIRE', WAITERS, QUEUE_MS)
end

-- Whether a waiter can be woken: one that was subscribed and is not any more has died, or lost its connection.
-- Where the server may not be asked, we believe so. A channel with a hash tag is a sharded one.
local heard_by  -- channel -> its number of subscribers, as one script call sees it: many waiters share one
local function reachable(heard, channel)
  if heard ~= '1' then return true end
  heard_by = heard_by or {}
  if not heard_by[channel] then
    local sharded = string.find(channel, '{', 1, true)
    local subscribers = redis.pcall('PUBSUB', sharded and 'SHARDNUMSUB' or 'NUMSUB', channel)
    heard_by[channel] = subscribers.err and 1 or subscribers[2]
  end
  return heard_by[channel] > 0
end

local function tell(channel, message)
  if channel == '-' then return end  -- nobody's
  redis.pcall(string.find(channel, '{', 1, true) and 'SPUBLISH' or 'PUBLISH', channel, message)
end

-- The waiter whose turn it is, from this place in the queue on: {token, life, channel, wants, place}, or nil. That
-- is the oldest live one that can be woken, or, if the first MUTES can not, the oldest live one. A waiter that lost its
-- connection may come back, so it keeps its place. turn() drops the dead, and reads more waiters with each step, since
-- where one is dead many may be. If a script call has looked at LOOKS of them, and all were dead, then the second result
-- tells the client to come again.
local looks = LOOKS
local function turn(place)
  local now, mute, mutes, number = nil, nil, 0, 1
  repeat
    local names = call('ZRANGE', QUEUE, place, place + number - 1)
    if not names[1] then return mute, 0 end
    local said, dead, found = call('HMGET', WAITERS, unpack(names)), {}, nil
    now, looks = now or micros() / 1000, looks - #names
    for i, who in ipairs(names) do
      local alive, life, heard, channel, wants = string.match(said[i] or '', '^(%d+) (%d+) (%d) (%S+) ?(.*)')
      if not (alive and tonumber(alive) > now) then
        dead[#dead + 1] = who
      else
        local this = {who, life, channel, wants, place}
        if reachable(heard, channel) then
          found = this
          break
        end
        mute, mutes, place = mute or this, mutes + 1, place + 1
      end
    end
    if dead[1] then
      call('ZREM', QUEUE, unpack(dead))
      call('HDEL', WAITERS, unpack(dead))
    end
    if found or mutes >= MUTES then return found or mute, 0 end
    number = math.min(number * 8, LOOK, looks)
  until number <= 0
  return mute, mute and 0 or call('EXISTS', QUEUE)
end

-- Tell a waiter that it was granted something. From now on it lives as long as that grant, unless it is heard of again.
local function push(who, life, channel, wants)
  local space = wants ~= '' and ' ' or ''
  call('HSET', WAITERS, who, string.format('%.0f %s 0 %s%s%s', micros() / 1000 + life, life, channel, space, wants))
  tell(channel, 'granted ' .. who)
end

-- The verb vouch: everybody named is alive. `settle` hands out what is free and returns a pttl or MORE, and whether the
-- head is to ask: in a quarantine, since its client may prove that nothing was lost; or to hear that another version has
-- the name. `holds` tells whether a token has been granted.
local function vouch(settle, holds)
  local channel, heard, states = ARGV[2], ARGV[3], {}
  local alive = string.format('%.0f', micros() / 1000 + ALIVE_MS)
  for i = 4, #ARGV, 2 do
    local queued = call('ZSCORE', QUEUE, ARGV[i])
    local said = queued and call('HGET', WAITERS, ARGV[i])
    if queued and not said then  -- evicted: nobody knows what it wants
      leave(ARGV[i])
      queued = nil
    end
    if queued then
      local wants = string.match(said, '^%d+ %d+ %d %S+( .*)') or ''
      call('HSET', WAITERS, ARGV[i], alive .. ' ' .. ARGV[i + 1] .. ' ' .. heard .. ' ' .. channel .. wants)
    end
    states[#states + 1] = queued and QUEUED or GONE
  end
  call('PEXPIRE', QUEUE, QUEUE_MS)
  call('PEXPIRE', WAITERS, QUEUE_MS)
  local pttl, doubt = settle()
  local head = call('ZRANGE', QUEUE, 0, 0)[1] or ''
  for i = 4, #ARGV, 2 do
    if holds(ARGV[i]) then
      states[i / 2 - 1] = GRANTED
    elseif doubt and ARGV[i] == head then
      states[i / 2 - 1] = AGAIN
    end
  end
  return {pttl, head, unpack(states)}
end

-- A tombstone: an acquire of this token that comes later takes nothing. It never cuts another one short.
local function bury(who, ms)
  if ms ~= '0' then
    local now = micros() / 1000
    local keep = string.format('%.0f', math.max(ms, call('PTTL', GONES)))
    call('PEXPIRE', GONES, keep)
    call('ZREMRANGEBYSCORE', GONES, '-inf', string.format('%.0f', now))
    redis.pcall('ZADD', GONES, string.format('%.0f', now + ms), who)
    call('PEXPIRE', GONES, keep)
  end
end

-- The verb execute, and the one that finds its keys.
local function execute(owns)
  if not owns then return {GONE} end
  return {GRANTED, call(ARGV[3], unpack(ARGV, 4))}
end

local function keys()
  return call('COMMAND', 'GETKEYS', unpack(ARGV, 2))
end
