-- The plain cases of the lock. Nearly every message acquires a free lock, confirms a handover, queues behind a holder,
-- or releases, while the record names this server and a lock. These statements do what the verbs of lock.lua do with
-- such a message. lock.lua includes them before all functions, because Lua makes every function anew in each call,
-- which takes longer than the commands of a plain case. They leave every other state to the verbs; by then they have
-- written nothing that the verb would not write. tests/model/test_plain_cases.py compares both ways.
local plain_record, stored_fence, ttl_at = false, nil, nil
local is_plain = not HAS_RETURNED and (verb == 'acquire' and ARGV[9] == 'lock' or verb == 'release')
local has_queue_or_tombstones = is_plain and verb == 'release' and call('EXISTS', QUEUE, TOMBSTONES) > 0
if is_plain and MARK == PLUS and (verb == 'acquire' or has_queue_or_tombstones) then
  -- What judge_voter() does where this server counts, and its record needs no change.
  local info, stored, time = redis.pcall('INFO', 'replication'), redis.pcall('GET', VOTER), call('TIME')
  local replid, since, longest = string.match(type(stored) == 'string' and stored or '', '^1 (%x+) (%d+) (%d+)')
  is_plain = replid and type(info) == 'string' and string.find(info, 'role:master\r', 1, true)
    and string.find(info, '\nmaster_replid:' .. replid .. '\r', 1, true)
    and tonumber(longest) >= tonumber(string.sub(STAMP, MARK_AT + 2))
    and since + longest <= time[1] * 1000 + math.floor(time[2] / 1000)
    and call('PTTL', VOTER) > MIN_VOTER_TTL_MS
  if is_plain then IDENTITY = string.sub(STAMP, 1, 13) .. string.sub(replid, 1, 12) end
end
if is_plain then
  plain_record = call('GET', RECORD)
  local identity_at, identity_end = string.find(plain_record or '', ' ' .. IDENTITY .. ' ', 1, true)
  if identity_at and string.sub(plain_record, 1, 7) == '1 lock ' then
    stored_fence, ttl_at = tonumber(string.sub(plain_record, 8, identity_at - 1)), identity_end + 1
  elseif not plain_record and verb == 'acquire' then  -- nobody has used this name lately
    local previous = (IN_QUORUM or IDENTITY == '-') and '-' or string.match(STAMP, ' %d+ %d+ %d+ (%S+)')
    stored_fence = previous == '-' and 0 or nil
  end
end
local counts_up = IN_QUORUM and stored_fence and stored_fence > 0  -- as next_fence() does
if stored_fence and verb == 'acquire' then
  local ttl, handover_ttl, subscribed, channel, max_waiters = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local owner = ARGV[8]
  local released, recorded_ttl, holder_at = '- ', nil, nil
  if plain_record then
    local released_at = string.find(plain_record, ' ', ttl_at, true) + 1
    recorded_ttl = tonumber(string.sub(plain_record, ttl_at, released_at - 2))
    holder_at = string.find(plain_record, ' ', released_at, true) + 1
    released = string.sub(plain_record, released_at, holder_at - 1)
  end
  local present = call('EXISTS', LOCK, QUEUE, TOMBSTONES)
  if present == 0
    or present == 1 and call('EXISTS', TOMBSTONES) == 1 and not call('ZSCORE', TOMBSTONES, token)
  then
    local time = call('TIME')
    local now_us = time[1] * 1000000 + time[2]
    local fence = counts_up and stored_fence + 1 or now_us
    if fence > stored_fence and fence <= now_us then
      local first_words = '1 lock ' .. string.format('%.0f', fence) .. ' ' .. IDENTITY .. ' ' .. ttl .. ' '
      call('SET', RECORD, first_words .. released .. token .. ' ' .. channel, 'PX', RECORD_TTL_MS + ttl)
      call('SET', LOCK, token, 'PX', ttl)
      return {GRANTED, fence}
    end
  else
    local holder, pttl = call('GET', LOCK), call('PTTL', LOCK)
    if holder ~= string.match(plain_record or '', '^[^ ]+', holder_at) then
      -- Free with a queue, revoked, in a quarantine, or foreign.
    elseif holder == token then
      if tonumber(ttl) <= math.min(recorded_ttl, RECORD_TTL_MS / 2) then
        if call('ZREM', QUEUE, token) == 1 then call('HDEL', WAITERS, token) end
        call('PEXPIRE', LOCK, math.max(pttl, ttl))  -- writes in any case, as the verb does
        return {GRANTED, stored_fence}
      end
    elseif pttl >= 0 and max_waiters == 'inf' and owner == '' and not call('ZSCORE', TOMBSTONES, token) then
      local waiter, wants, time, is_head = token, ' lock ' .. ttl, call('TIME')
      local now_ms = time[1] * 1000 + time[2] / 1000
      --include enqueue
      return {QUEUED, holder, pttl, is_head and 1 or 0}
    end
  end
elseif stored_fence and call('GET', LOCK) == token then
  local holder_at = string.find(plain_record, ' ' .. token .. ' ', ttl_at, true)
  if not holder_at or string.find(plain_record, ' ', holder_at + #token + 2, true) then
    -- The record names another holder, or ends with words of a later version.
  elseif not (has_queue_or_tombstones and call('ZSCORE', TOMBSTONES, 'ousted')) then
    local head = nil
    if has_queue_or_tombstones then
      if call('ZREM', QUEUE, token) == 1 then call('HDEL', WAITERS, token) end
      head = call('ZRANGE', QUEUE, 0, 0)[1]
    end
    if not head then
      call('DEL', LOCK)
      local first_words = string.sub(plain_record, 1, string.find(plain_record, ' ', ttl_at, true))
      redis.pcall('SET', RECORD, first_words .. token .. ' - -', 'KEEPTTL')
      if ARGV[3] ~= '0' then
        local member, ttl, time = token, ARGV[3], call('TIME')
        local now_ms = time[1] * 1000 + time[2] / 1000
        --include tombstone
      end
      return {1, 0}
    end
    local time = call('TIME')
    local alive_until, handover_ttl, subscribed, channel, wants, at_sign, ttl =
      string.match(call('HGET', WAITERS, head) or '', '^(%d+) (%d+) (%d) ([^ ]+) (lock ?(@?)(%d*))$')
    if at_sign == '@' or ttl == '' then ttl = handover_ttl end  -- an earlier version stored the entry
    local now_us = time[1] * 1000000 + time[2]
    local fence = counts_up and stored_fence + 1 or now_us
    local is_sharded = channel and string.find(channel, '{', 1, true)
    if ARGV[3] == '0' and alive_until and tonumber(alive_until) > now_us / 1000
      and fence > stored_fence and fence <= now_us
      and (subscribed ~= '1'
        or (redis.pcall('PUBSUB', is_sharded and 'SHARDNUMSUB' or 'NUMSUB', channel)[2] or 1) > 0)
      and not redis.pcall('SET', RECORD, '1 lock ' .. string.format('%.0f', fence) .. ' ' .. IDENTITY .. ' ' .. ttl
        .. ' ' .. token .. ' ' .. head .. ' ' .. channel, 'PX', RECORD_TTL_MS + ttl).err
    then
      call('SET', LOCK, head, 'PX', handover_ttl)
      call('HSET', WAITERS, head,
        string.format('%.0f %s 0 %s %s', now_us / 1000 + handover_ttl, handover_ttl, channel, wants))
      if channel ~= '-' then redis.pcall(is_sharded and 'SPUBLISH' or 'PUBLISH', channel, 'granted ' .. head) end
      return {1, 0}
    end
  end
end
