-- The queue that every waiting primitive shares: included at the head of its script. Who waits stands in a sorted set,
-- by arrival; who of them lives and can be woken is in a hash.
--
--   KEYS[3] queue    zset  token of a waiter -> number of arrival
--   KEYS[4] waiters  hash  token of a waiter -> "<alive until, ms> <life, ms> <heard 0|1> <channel>[ <what it wants>]"
--   KEYS[5] gone     zset  token that left in doubt -> forget after, ms: a late acquire of it takes nothing
--
-- A script that includes this decides who may hold: it asks next_waiter() whose turn it is, grants, and wakes with announce_grant().
--
-- Wire format (ADR 10). The scripts store texts of words, one space apart: records, waiters, shares, notes. The words
-- that a header names keep their places for ever. A later version may add words after them, but before the free text,
-- which comes last and begins with " !". A script passes over words that it does not know, and keeps them when it changes
-- a text; only a text that begins anew (for another grant or generation) begins without them. A change that older
-- versions may not ignore raises the number before the record: a script refuses any other number than its own.

--   ARGV[#ARGV] epoch  "" | "<identity> <since> <wait> <former> [<fine>...]", see quarantine_left(). With "+" for the first
--                      space, or alone, this is one server of a quorum. The connection adds it to every message, so
--                      no header names it.

local GRANTED, QUEUED, BUSY, RETRY, NOT_FOUND, REVOKED, NO_EXPIRY, WRONG_KIND, LIMIT_MISMATCH =
  1, 2, 3, 4, 5, 6, 7, 8, 9
local STAMP = table.remove(ARGV)
local MARK_AT, PLUS = 26, 43  -- PLUS: the byte of "+"
local IDENTITY = #STAMP < MARK_AT and '-' or string.sub(STAMP, 1, MARK_AT - 1)
local IN_QUORUM = STAMP == '+' or string.byte(STAMP, MARK_AT) == PLUS
local RECORD_TTL_MS, QUEUE_TTL_MS, LIVENESS_MS, MAX_PER_CALL = 300000, 10000, 3000, 32
-- Waiters that a script call looks at; that are read at once; that can't be woken.
local MAX_SCANNED, MAX_READ, MAX_UNREACHABLE = 500, 100, 64
local RECORD, QUEUE, WAITERS, TOMBSTONES = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local MORE_EXPIRED = -3  -- in place of a pttl: there are more dead waiters than one script call drops, come again at once
local call, verb, token = redis.call, ARGV[1], ARGV[2]

local function get_time_us()
  local t = call('TIME')
  return t[1] * 1000000 + t[2]
end

local function parse_history()
  return string.match(STAMP, '^(%d+) (%d+) (%S+) ?(.*)', MARK_AT + 1)
end

-- For how many ms nothing may be granted here, since leases that this server does not know may be alive; and the
-- evidence: the identity of the one before, with that of this one and since when it is known, so that clients that come
-- later, and know only when they met it themselves, wait no longer. A record says under which identity of the server was
-- granted last; another one is here since a restart or a failover, which may have lost what was granted in between.
-- `since` (ms) on this server's clock is when that was at the latest, `wait` (ms) the longest that a lease of before may
-- last; `former` is the identity that the client knew before, or "-": evidence for what has no record. Records of `fine`
-- identities came without loss: all, or with "/<least ttl ms>" those of leases with that ttl or a longer one.
local function quarantine_left(recorded, ttl)
  if IDENTITY == '-' or recorded == IDENTITY then return 0 end
  local since, wait, previous, lossless = parse_history()
  if not recorded or recorded == '-' then recorded = previous end
  if recorded == '-' then return 0 end
  local evidence, successor, known_since = string.match(recorded, '^([^>]*)>([^>]*)>(%d+)')
  if successor == IDENTITY then since = math.min(since, known_since) end
  recorded = evidence or recorded
  for prefix, min_ttl in string.gmatch(lossless, '([^ /]+)/?(%d*)') do
    if string.sub(recorded, 1, #prefix) == prefix and (tonumber(min_ttl) or 0) <= tonumber(ttl or 0) then return 0 end
  end
  local left_ms = math.max(0, math.ceil(since + math.max(wait, ttl or 0) - get_time_us() / 1000))
  return left_ms, string.format('%s>%s>%.0f', recorded, IDENTITY, since)
end

-- The next fence after this one, and by how many ms it is ahead of the clock. The clock makes good for grants that the
-- server has lost. In a quorum they are agreed on by counting, so that servers answer alike; unless this one may have lost
-- some.
local function next_fence(fence, recorded)
  local now_us = get_time_us()
  local following = IN_QUORUM and fence > 0 and recorded == IDENTITY and fence + 1 or math.max(fence + 1, now_us)
  return following, math.max(0, math.ceil((following - now_us) / 1000))
end

-- Splits the rest of a stored text, after the words that this version knows: into the words of a later version, each
-- after its space, and the free text, or nil.
local function split_free_text(tail)
  if tail == '' then return '' end
  local mark_at = string.find(tail, ' !', 1, true)
  if not mark_at then return tail end
  return string.sub(tail, 1, mark_at - 1), string.sub(tail, mark_at + 2)
end

local function dequeue(waiter)
  call('ZREM', QUEUE, waiter)
  call('HDEL', WAITERS, waiter)
end

-- Stand in the queue, or stay there, and be alive.
local function enqueue(waiter, handover_ttl, subscribed, channel, wants)
  local alive_until = get_time_us() / 1000 + LIVENESS_MS
  call('PEXPIRE', QUEUE, QUEUE_TTL_MS)  -- before the first write: who has no right to it leaves nothing
  if not call('ZSCORE', QUEUE, waiter) then
    local newest = call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0
    call('ZADD', QUEUE, string.format('%.0f', newest + 1), waiter)
    call('PEXPIRE', QUEUE, QUEUE_TTL_MS)
  end
  call('HSET', WAITERS, waiter,
    string.format('%.0f %s %s %s%s', alive_until, handover_ttl, subscribed, channel, wants or ''))
  call('PEXPIRE', WAITERS, QUEUE_TTL_MS)
end

-- Whether a waiter can be woken: one that was subscribed and is not any more has died, or lost its connection.
-- Where the server may not be asked, we believe so. A channel with a hash tag is a sharded one.
local subscriber_counts  -- channel -> its number of subscribers, as one script call sees it: many waiters share one
local function is_reachable(subscribed, channel)
  if subscribed ~= '1' then return true end
  subscriber_counts = subscriber_counts or {}
  if not subscriber_counts[channel] then
    local is_sharded = string.find(channel, '{', 1, true)
    local subscribers = redis.pcall('PUBSUB', is_sharded and 'SHARDNUMSUB' or 'NUMSUB', channel)
    subscriber_counts[channel] = subscribers.err and 1 or subscribers[2]
  end
  return subscriber_counts[channel] > 0
end

local function publish(channel, message)
  if channel == '-' then return end  -- nobody's
  redis.pcall(string.find(channel, '{', 1, true) and 'SPUBLISH' or 'PUBLISH', channel, message)
end

-- The waiter whose turn it is, from this place in the queue on: {token, life, channel, wants, place}, or nil. That
-- is the oldest live one that can be woken, or, if the first MAX_UNREACHABLE can not, the oldest live one. A waiter that lost its
-- connection may come back, so it keeps its place. next_waiter() drops the dead, and reads more waiters with each step, since
-- where one is dead many may be. If a script call has looked at MAX_SCANNED of them, and all were dead, then the second result
-- tells the client to come again.
local scans_left = MAX_SCANNED
local function next_waiter(position)
  local now_ms, unreachable, unreachable_count, batch_size = nil, nil, 0, 1
  repeat
    local tokens = call('ZRANGE', QUEUE, position, position + batch_size - 1)
    if not tokens[1] then return unreachable, 0 end
    local entries, dead, found = call('HMGET', WAITERS, unpack(tokens)), {}, nil
    now_ms, scans_left = now_ms or get_time_us() / 1000, scans_left - #tokens
    for i, waiter in ipairs(tokens) do
      local alive_until, handover_ttl, subscribed, channel, wants =
        string.match(entries[i] or '', '^(%d+) (%d+) (%d) (%S+) ?(.*)')
      if not (alive_until and tonumber(alive_until) > now_ms) then
        dead[#dead + 1] = waiter
      else
        local candidate = {waiter, handover_ttl, channel, wants, position}
        if is_reachable(subscribed, channel) then
          found = candidate
          break
        end
        unreachable, unreachable_count, position = unreachable or candidate, unreachable_count + 1, position + 1
      end
    end
    if dead[1] then
      call('ZREM', QUEUE, unpack(dead))
      call('HDEL', WAITERS, unpack(dead))
    end
    if found or unreachable_count >= MAX_UNREACHABLE then return found or unreachable, 0 end
    batch_size = math.min(batch_size * 8, MAX_READ, scans_left)
  until batch_size <= 0
  return unreachable, unreachable and 0 or call('EXISTS', QUEUE)
end

-- Tell a waiter that it was granted something. From now on it lives as long as that grant, unless it is heard of again.
local function announce_grant(waiter, handover_ttl, channel, wants)
  local space = wants ~= '' and ' ' or ''
  call('HSET', WAITERS, waiter,
    string.format('%.0f %s 0 %s%s%s', get_time_us() / 1000 + handover_ttl, handover_ttl, channel, space, wants))
  publish(channel, 'granted ' .. waiter)
end

-- The verb vouch: everybody named is alive. `settle` hands out what is free and returns a pttl or MORE_EXPIRED, and whether the
-- head is to ask: in a quarantine, since its client may prove that nothing was lost; or to hear that another version has
-- the name. `holds` tells whether a token has been granted.
local function heartbeat(hand_out_free, is_granted)
  local channel, subscribed, states = ARGV[2], ARGV[3], {}
  local alive_until = string.format('%.0f', get_time_us() / 1000 + LIVENESS_MS)
  for i = 4, #ARGV, 2 do
    local waiter, handover_ttl = ARGV[i], ARGV[i + 1]
    local is_queued = call('ZSCORE', QUEUE, waiter)
    local entry = is_queued and call('HGET', WAITERS, waiter)
    if is_queued and not entry then  -- evicted: nobody knows what it wants
      dequeue(waiter)
      is_queued = nil
    end
    if is_queued then
      local wants = string.match(entry, '^%d+ %d+ %d %S+( .*)') or ''
      call('HSET', WAITERS, waiter, alive_until .. ' ' .. handover_ttl .. ' ' .. subscribed .. ' ' .. channel .. wants)
    end
    states[#states + 1] = is_queued and QUEUED or NOT_FOUND
  end
  call('PEXPIRE', QUEUE, QUEUE_TTL_MS)
  call('PEXPIRE', WAITERS, QUEUE_TTL_MS)
  local pttl, head_must_ask = hand_out_free()
  local head = call('ZRANGE', QUEUE, 0, 0)[1] or ''
  for n = 1, #states do
    local waiter = ARGV[2 + 2 * n]
    if is_granted(waiter) then
      states[n] = GRANTED
    elseif head_must_ask and waiter == head then
      states[n] = RETRY
    end
  end
  return {pttl, head, unpack(states)}
end

-- A tombstone: an acquire of this token that comes later takes nothing. It never cuts another one short.
local function add_tombstone(member, ttl)
  if ttl ~= '0' then
    local now_ms = get_time_us() / 1000
    local key_ttl = string.format('%.0f', math.max(ttl, call('PTTL', TOMBSTONES)))
    call('PEXPIRE', TOMBSTONES, key_ttl)
    call('ZREMRANGEBYSCORE', TOMBSTONES, '-inf', string.format('%.0f', now_ms))
    redis.pcall('ZADD', TOMBSTONES, string.format('%.0f', now_ms + ttl), member)
    call('PEXPIRE', TOMBSTONES, key_ttl)
  end
end

-- The verb execute.
local function execute_command(is_holder)
  if not is_holder then return {NOT_FOUND} end
  return {GRANTED, call(unpack(ARGV, 3))}
end
