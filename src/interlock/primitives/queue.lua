-- The queue of waiters. Every script whose callers may wait includes this file, behind message.lua. Such scripts share
-- more than the queue: the clock at the head of this file; at its end the tombstones, the verb `execute`, and free
-- text.
--
-- Theory. A sorted set holds the waiters in order of arrival. A hash holds an entry for each waiter: until when the
-- waiter counts as alive, and which channel wakes the waiter. Heartbeats keep a waiter alive. next_waiter() drops a
-- waiter whose heartbeats have stopped, and passes over a waiter whose channel has lost its subscriber. The including
-- script decides who may hold: it calls next_waiter(), grants something to that waiter, and calls announce_grant(). The
-- client's side of the queue is _client/waiting.py.
--
--   KEYS[2] record   string  the including script reads and writes the record
--   KEYS[3] queue    zset    token of a waiter -> number of the waiter's arrival
--   KEYS[4] waiters  hash    token of a waiter ->
--                          "<alive until, ms> <handover ttl, ms> <subscribed 0|1> <channel>[ <what the waiter wants>]"
--                          the including script says what its waiters want
--   KEYS[5] gone     zset    tombstones: token -> until when an acquire of the token takes nothing, ms
--
-- Every "until" is a time on the server's clock.

-- Limits of next_waiter(): the waiters that one script call looks at, the waiters that one command reads, and the
-- unreachable waiters that one call passes over.
local MAX_SCANNED, MAX_READ, MAX_UNREACHABLE = 500, 100, 64

local time_us  -- one reading of the clock for the whole script call
local function get_time_us()
  if not time_us then
    local time = call('TIME')
    time_us = time[1] * 1000000 + time[2]
  end
  return time_us
end

local function dequeue(waiter)
  if call('ZREM', QUEUE, waiter) == 1 then call('HDEL', WAITERS, waiter) end
end

-- Puts the waiter into the queue, or keeps the waiter's place there. Returns whether the waiter is the head.
local function enqueue(waiter, handover_ttl, subscribed, channel, wants)
  local now_ms, is_head = get_time_us() / 1000, nil
  --include enqueue
  return is_head
end

-- Returns nil if the waiter may enter the queue, else how many waiters the queue has: `max_waiters` ("inf": any number)
-- or more. A waiter that stands in the queue keeps its place. Dead waiters do not count, as far as this function finds
-- and drops them: in each script call it looks at MAX_PER_CALL waiters of a long queue, at others in the next call.
local function count_if_full(waiter, max_waiters)
  if max_waiters == 'inf' or call('ZSCORE', QUEUE, waiter) then return end
  local waiting = call('ZCARD', QUEUE)
  if waiting < tonumber(max_waiters) then return end
  local now_us = get_time_us()
  local position = now_us % math.max(1, waiting - MAX_PER_CALL + 1)
  local tokens = call('ZRANGE', QUEUE, position, position + MAX_PER_CALL - 1)
  for i, entry in ipairs(call('HMGET', WAITERS, unpack(tokens))) do
    if tonumber(string.match(entry or '', '^%d+') or 0) * 1000 < now_us then
      dequeue(tokens[i])
      waiting = waiting - 1
    end
  end
  return waiting >= tonumber(max_waiters) and waiting or nil
end

local subscriber_counts  -- channel -> number of subscribers: the script asks once per channel, which many waiters share
-- Whether a push can reach the waiter. A waiter that was subscribed, and whose channel has no subscriber now, has died
-- or has lost its connection. If the ACL refuses PUBSUB, the script assumes a subscriber. A channel with a hash tag is
-- a sharded channel.
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
  if channel == '-' then return end  -- the client has no channel
  redis.pcall(string.find(channel, '{', 1, true) and 'SPUBLISH' or 'PUBLISH', channel, message)
end

local scans_left = MAX_SCANNED  -- waiters that next_waiter() may still look at in this script call
-- Returns the waiter whose turn it is, from `position` in the queue on, as {token, handover ttl, channel, wants,
-- position}, or nil; and 1 if the client must ask again at once, because all of the MAX_SCANNED waiters that this
-- script call looked at were dead, and the queue holds more.
--
-- The turn is the oldest live and reachable waiter's; if the first MAX_UNREACHABLE live waiters are unreachable, the
-- oldest live waiter's. The reply of this call reaches the waiter that sent the message, `token`. An unreachable waiter
-- keeps its place, since its client may connect again. Each step reads eight times as many waiters as the step before,
-- because where one waiter is dead, many may be.
local function next_waiter(position)
  local now_ms, unreachable, unreachable_count, batch_size = nil, nil, 0, 1
  repeat
    local tokens = call('ZRANGE', QUEUE, position, position + batch_size - 1)
    if not tokens[1] then return unreachable, 0 end
    local entries, dead, reachable = call('HMGET', WAITERS, unpack(tokens)), {}, nil
    now_ms, scans_left = now_ms or get_time_us() / 1000, scans_left - #tokens
    for i, waiter in ipairs(tokens) do
      local alive_until, handover_ttl, subscribed, channel, wants =
        string.match(entries[i] or '', '^(%d+) (%d+) (%d) (%S+) ?(.*)')
      if not (alive_until and tonumber(alive_until) > now_ms) then
        dead[#dead + 1] = waiter
      else
        local candidate = {waiter, handover_ttl, channel, wants, position}
        if waiter == token or is_reachable(subscribed, channel) then
          reachable = candidate
          break
        end
        unreachable, unreachable_count, position = unreachable or candidate, unreachable_count + 1, position + 1
      end
    end
    if dead[1] then
      call('ZREM', QUEUE, unpack(dead))
      call('HDEL', WAITERS, unpack(dead))
    end
    if reachable or unreachable_count >= MAX_UNREACHABLE then return reachable or unreachable, 0 end
    batch_size = math.min(batch_size * 8, MAX_READ, scans_left)
  until batch_size <= 0
  return unreachable, unreachable and 0 or call('EXISTS', QUEUE)
end

-- Wakes a waiter that has just been granted something. From now on the waiter counts as alive only as long as the grant
-- lasts, unless another heartbeat arrives. The entry says that the waiter is not subscribed (0), so is_reachable() does
-- not ask for its channel.
local function announce_grant(waiter, handover_ttl, channel, wants)
  local space = wants ~= '' and ' ' or ''
  call('HSET', WAITERS, waiter,
    string.format('%.0f %s 0 %s%s%s', get_time_us() / 1000 + handover_ttl, handover_ttl, channel, space, wants))
  publish(channel, 'granted ' .. waiter)
end

-- The verb `heartbeat`: marks every waiter named in the message as alive. `hand_out_free` grants what is free, and
-- returns a pttl or MORE_DEAD_WAITERS, and whether the head of the queue must send its acquire again: because of a
-- quarantine, which the head's client may be able to end by a proof; because another version owns the record, which
-- acquire reports; or because only acquire says what the script lacks. `is_granted` says whether a token has been
-- granted.
local function heartbeat(hand_out_free, is_granted)
  local channel, subscribed, states = ARGV[2], ARGV[3], {}
  local alive_until = string.format('%.0f', get_time_us() / 1000 + LIVENESS_MS)
  for i = 4, #ARGV, 2 do
    local waiter, handover_ttl = ARGV[i], ARGV[i + 1]
    local is_queued = call('ZSCORE', QUEUE, waiter)
    local entry = is_queued and call('HGET', WAITERS, waiter)
    if is_queued and not entry then  -- the server has evicted the entry, and with it what the waiter wants
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

-- Adds a tombstone for `ttl` ms: an acquire of this token that arrives later takes nothing.
local function add_tombstone(member, ttl)
  if ttl ~= '0' then
    local now_ms = get_time_us() / 1000
    --include tombstone
  end
end

-- The verb `execute`: runs the command of the message if its sender is a holder.
local function execute_command(is_holder)
  if not is_holder then return {NOT_FOUND} end
  return {GRANTED, call(unpack(ARGV, 3))}
end

-- Splits the end of a stored text, after the words that this version knows, into the words of a later version, each
-- with the space before it, and the free text, or nil.
local function split_free_text(tail)
  if tail == '' then return '' end
  local mark_at = string.find(tail, ' !', 1, true)
  if not mark_at then return tail end
  return string.sub(tail, 1, mark_at - 1), string.sub(tail, mark_at + 2)
end
