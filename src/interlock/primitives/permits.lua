-- Permits: many holders up to a limit, and one queue for all. A semaphore; and a read-write lock, whose readers take
-- one permit each and whose writer takes all of them.
--
-- Theory. A sorted set holds the holders by the end of their leases, so each lease ends by itself, on the server's
-- clock. A hash holds the share of each holder, and the sum of all shares. The request that gives permits back, or that
-- finds expired leases, hands the free permits to the queue, strictly in order of arrival: while the request of the
-- oldest waiter does not fit, nobody behind that waiter gets a permit. So a large request (or a writer) cannot starve,
-- and small requests (readers) side by side in the queue enter together. A handover is a short grant until the waiter
-- confirms it, as in lock.lua, and each confirmation hands out more.
--
-- Rules. (a) to (f) and (h) of lock.lua, and:
-- (i) A script call changes a share and the sum together.
-- (j) The limit is the record's. A client with another limit gets LIMIT_MISMATCH.
--
-- KEYS   1 holders  zset    token of a holder -> end of its lease, ms
--        2 record   string  "1 <kind> <fence> <identity> <ttl ms> <last released> <limit>[ !><until, ms> <token> <why>]",
--                           as in lock.lua. Where no record was, a quarantine stores the kind "unknown" and the limit
--                           0.
--        3 queue    zset    as in queue.lua; a waiter wants "<permits>"
--        4 waiters  hash    as in queue.lua
--        5 gone     zset    as in queue.lua; also the operations that were done
--        6 shares   hash    token of a holder -> "<permits> <fence> <channel>[ !<why revoked>]"; "sum" -> their sum
--        ... for `renew`: holders, record, shares, ... of many instead; for `execute`: its keys follow
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply
--   acquire  token  ttl ms  handover ttl ms  subscribed 0|1  channel  max waiters  kind  permits  limit  own lease
--                             RETURN {GRANTED, fence} | {QUEUED | BUSY, a holder, pttl of the next end, head 0|1}
--                                  | {RETRY} | {NOT_FOUND} | {REVOKED, why} | {WRONG_KIND, record}
--                                  | {LIMIT_MISMATCH, limit} | {CROWDED, number of waiters}
--                             max waiters: as in lock.lua
--                             own lease: token of a lease of the same reader or writer, beside which the client may
--                             read without standing in the queue; or ""
--                             NOT_FOUND: the token has a tombstone, or the server has evicted its share
--   release  token  tombstone ttl ms
--                             RETURN {the lease was the sender's 0|1, ask again 0|1}
--                             also takes a waiter out of the queue
--   heartbeat  channel  subscribed 0|1  (token  handover ttl ms)...
--                             RETURN {pttl of the next end | MORE_DEAD_WAITERS, head's token | "", state...}
--                             state: GRANTED | QUEUED | RETRY | NOT_FOUND
--   renew    (token  ttl ms)...
--                             RETURN {state...}
--                             state: GRANTED | NOT_FOUND | {REVOKED, why} | error text
--   execute  token  command  argument...
--                             RETURN {GRANTED, reply} | {NOT_FOUND}
--   revoke   token  force 0|1  why
--                             RETURN {done 0|1, ms left}
--                             token: a holder's, or "!quarantine:<evidence>" that inspect returned
--   holders  from ms  max holders
--                             RETURN {token, end of its lease in ms, ...}
--                             the holders whose leases end then or later, in the order in which these end
--   limit    operation  kind  limit
--                             RETURN {GRANTED, limit} | {WRONG_KIND, record}
--                             runs once for each operation
--   keys     command  argument...
--                             RETURN {key...}
--                             the arguments that are keys of the command
--   inspect  max items        RETURN {record | "", sum, number of holders, number of waiters,
--                                     {holder, ms left, its share, handed over 0|1, ...}, {waiter, what it wants, ...},
--                                     ms of quarantine left, "!quarantine:<evidence>" | "", departed}
--                             handed over, departed, waiters: as in lock.lua

--include message

local HOLDERS, SHARES = KEYS[1], KEYS[6]

--include permits_plain_cases
--include queue
--include quarantine

-- The words of the record, which read_record() sets; `tail` is the rest of the record, after the words that this
-- version knows.
local fence, granted_by, last_ttl, last_released, limit, kind, tail, record = 0, '-', '0', '-', nil, nil, '', nil
local is_readable = true  -- false: another version or another kind of primitive owns the record
local function get_time_ms()
  return get_time_us() / 1000
end

-- Returns whether this script may change the record: there is no record, or its version is 1 and its kind is one of
-- these here. The script leaves every other record as it is, and grants nothing.
local function read_record()
  record = call('GET', RECORD)
  if not record then return true end
  local stored_kind, stored_fence, identity, ttl, released, stored_limit, words =
    string.match(record, '^1 (%a+) (%d+) (%S+) (%d+) (%S+) (%S+)(.*)')
  is_readable = (stored_kind == 'semaphore' or stored_kind == 'rwlock' or stored_kind == 'unknown')
    and tonumber(stored_limit) ~= nil
  if not is_readable then return false end
  if stored_kind ~= 'unknown' then kind, limit = stored_kind, tonumber(stored_limit) end
  fence, granted_by, last_ttl, last_released, tail = tonumber(stored_fence), identity, ttl, released, words
  local taken_until = tail ~= '' and string.match(tail, ' !>(%d+) ')
  if taken_until and tonumber(taken_until) < get_time_ms() then tail = split_free_text(tail) end
  return true
end

-- Stores the record; no other function does. The record outlives a lease of `ttl` ms and every earlier lease by
-- RECORD_TTL_MS, and outlives the moment at which the clock reaches the fence, even if somebody sets the clock back.
-- `ttl` nil: the record keeps its TTL, which is right while the fence stays the same.
local function write_record(ttl)
  local value = string.format(
    '1 %s %.0f %s %s %s %d%s', kind or 'unknown', fence, granted_by, last_ttl, last_released, limit or 0, tail
  )
  if not ttl then return call('SET', RECORD, value, 'KEEPTTL') end
  local ahead_ms = math.max(0, math.ceil(fence / 1000 - get_time_ms()))
  call('SET', RECORD, value, 'PX', string.format('%.0f', math.max(RECORD_TTL_MS + ttl + ahead_ms, call('PTTL', RECORD))))
end

-- Returns the token's permits, fence, channel, reason of a revocation or nil, and the words of a later version; nothing
-- if the token has no share.
local function read_share(holder)
  local permits, held_fence, channel, text = string.match(call('HGET', SHARES, holder) or '', '^(%d+) (%d+) (%S+)(.*)')
  if not permits then return end
  local later_words, reason = split_free_text(text)
  return tonumber(permits), held_fence, channel, reason, later_words
end

local sum  -- of all shares; nil: this script call has not read it
local function read_sum()
  sum = sum or tonumber(call('HGET', SHARES, 'sum') or 0)
  return sum
end

-- Makes holders and shares live as long as the longest lease in them.
local function extend_keys(until_ms)
  local ttl = math.ceil(math.max(until_ms - get_time_ms(), call('PTTL', HOLDERS)))
  call('PEXPIRE', HOLDERS, ttl)
  call('PEXPIRE', SHARES, ttl)
end

local function remove_holder(holder)
  local permits = read_share(holder)
  call('ZREM', HOLDERS, holder)
  if permits then
    call('HDEL', SHARES, holder)
    sum = call('HINCRBY', SHARES, 'sum', -permits)
    if call('EXISTS', HOLDERS) == 0 then
      call('DEL', SHARES)
      sum = 0
    end
  end
  return permits
end

local function is_holder(holder)
  local lease_end = call('ZSCORE', HOLDERS, holder)
  return lease_end and tonumber(lease_end) > get_time_ms()
end

-- Grants permits. The record says the longest ttl of the leases side by side. The record is the first write: without
-- memory this write fails, and nothing is granted.
local function grant(holder, permits, ttl, channel)
  if call('EXISTS', HOLDERS) == 1 then last_ttl = math.max(last_ttl, ttl) else last_ttl = ttl end
  fence, granted_by = next_fence(fence, granted_by), IDENTITY
  write_record(ttl)
  sum = call('HINCRBY', SHARES, 'sum', permits)
  call('HSET', SHARES, holder, string.format('%d %.0f %s', permits, fence, channel))
  call('ZADD', HOLDERS, string.format('%.0f', get_time_ms() + ttl), holder)
  extend_keys(get_time_ms() + ttl)
end

local has_more_expired  -- what drop_expired() has returned, since one call of it is enough
-- Drops expired leases; returns 1 if there may be more than one script call drops, so that the client must ask again.
local function drop_expired()
  if not has_more_expired then
    local expired =
      call('ZRANGEBYSCORE', HOLDERS, '-inf', string.format('%.0f', get_time_ms()), 'LIMIT', 0, MAX_PER_CALL)
    for _, holder in ipairs(expired) do remove_holder(holder) end
    if call('EXISTS', HOLDERS) == 0 then
      call('DEL', SHARES)
      sum = 0
    end
    has_more_expired = #expired == MAX_PER_CALL and 1 or 0
  end
  return has_more_expired
end

-- Returns what decide_quarantine() returns, after storing the evidence in the record for clients that have none.
local function apply_quarantine()
  if not is_readable then return 0 end
  local left_ms, evidence = decide_quarantine(granted_by, last_ttl, fence)
  if left_ms > 0 and granted_by ~= evidence then
    granted_by = evidence
    write_record(0)
  end
  return left_ms, evidence
end

-- Returns how many waiters, from `position` in the queue on, have been granted their permits and have not confirmed
-- yet: at most `most`. In a crowd that enters together, each confirmation finds as many of them as one call may grant.
local function count_granted(position, most)
  local shares = call('HMGET', SHARES, unpack(call('ZRANGE', QUEUE, position, position + most - 1)))
  for i = 1, #shares do
    if not shares[i] then return i - 1 end
  end
  return #shares
end

-- Hands the free permits to the queue, in order. Returns whether the client must ask again (0|1), and what keeps
-- permits from a newcomer: the token of a waiter whose request does not fit, "!" in a quarantine, "" if this call has
-- granted as many requests as one call may, or nil.
local function hand_out_permits()
  local retry = drop_expired()
  if retry == 1 or not limit then return retry end
  if apply_quarantine() > 0 then return retry, '!' end
  local free, position, looked_at = limit - read_sum(), 0, 0
  while looked_at < MAX_PER_CALL do
    local candidate, retry_scan = next_waiter(position)
    if not candidate then return math.max(retry, retry_scan) end
    local waiter, handover_ttl, channel, wants, candidate_position = unpack(candidate)
    if is_holder(waiter) then  -- its share is missing if the server has evicted it
      local granted = math.max(1, count_granted(candidate_position, MAX_PER_CALL - looked_at))
      position, looked_at = candidate_position + granted, looked_at + granted
    else
      looked_at = looked_at + 1
      local permits = tonumber(string.match(wants, '^%d+')) or math.huge
      if permits > limit then  -- somebody has lowered the limit: the waiter wakes up, asks and learns so
        dequeue(waiter)
        publish(channel, 'granted ' .. waiter)
        position = candidate_position
      else
        if permits > free or not pcall(grant, waiter, permits, handover_ttl, channel) then return retry, waiter end
        free = free - permits
        announce_grant(waiter, handover_ttl, channel, wants)
        position = candidate_position + 1
      end
    end
  end
  return retry, ''
end

-- Returns in how many ms the next lease ends, or the quarantine, and the token or the marker; -2 if there is neither.
local function find_next_end()
  local left_ms, evidence = apply_quarantine()
  if left_ms > 0 then return left_ms, '!quarantine:' .. evidence end
  local first = call('ZRANGE', HOLDERS, 0, 0, 'WITHSCORES')
  return first[1] and math.max(1, math.ceil(first[2] - get_time_ms())) or -2, first[1]
end

if verb == 'acquire' then
  local ttl, handover_ttl, subscribed, channel, max_waiters = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local wanted_kind, permits, wanted_limit, own_lease = ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11]
  if not read_record() or kind and kind ~= wanted_kind then return {WRONG_KIND, record} end
  kind = wanted_kind
  local retry = drop_expired()
  if is_holder(token) then  -- a second copy of the request, or the confirmation of a handover
    dequeue(token)
    local _, held_fence, _, reason = read_share(token)
    if not held_fence then
      remove_holder(token)
      return {NOT_FOUND}
    end
    if reason then return {REVOKED, reason} end
    local lease_end = get_time_ms() + ttl
    if tonumber(call('ZSCORE', HOLDERS, token)) < lease_end then
      call('ZADD', HOLDERS, string.format('%.0f', lease_end), token)
    end
    extend_keys(lease_end)  -- writes in any case, as in lock.lua
    limit = limit or wanted_limit  -- the server has evicted the record
    if record and tonumber(last_ttl) < tonumber(ttl) then  -- the record has the handover ttl
      last_ttl = ttl
      pcall(write_record)
    end
    extend_record(RECORD, tonumber(ttl))
    hand_out_permits()  -- one call grants to MAX_PER_CALL waiters at most; their confirmations hand out the rest
    return {GRANTED, tonumber(held_fence)}
  end
  if call('ZSCORE', TOMBSTONES, token) then return {NOT_FOUND} end
  limit = limit or wanted_limit
  if limit ~= wanted_limit then
    dequeue(token)
    hand_out_permits()
    return {LIMIT_MISMATCH, limit}
  end
  local retry_scan, blocker = hand_out_permits()
  if math.max(retry, retry_scan) == 1 then return {RETRY} end
  if not is_holder(token) then
    -- A reader with a lease of its own never stands in the queue: its own lease may be the one for which the queue
    -- waits. In a quarantine such a reader waits, too, since only its client knows whether it held its own lease all the
    -- time: the server may have lost the end of that lease, and a grant to another client after it.
    local reads_beside_own = wanted_kind == 'rwlock' and own_lease ~= '' and permits == 1 and is_holder(own_lease)
    local is_free = permits <= limit - read_sum() and (not blocker or blocker == token)
    if is_free or reads_beside_own and blocker ~= '!' then
      grant(token, permits, ttl, channel)
      dequeue(token)
      return {GRANTED, fence}
    else
      local pttl, holder = find_next_end()
      if max_waiters == '0' then return {BUSY, holder or '', pttl, 0} end
      if reads_beside_own then return {QUEUED, holder, pttl, 1} end  -- so the client asks again when that time is over
      local waiting = count_if_full(token, max_waiters)
      if waiting then return {CROWDED, waiting} end
      local is_head = enqueue(token, handover_ttl, subscribed, channel, ' ' .. permits)
      write_record(0)
      return {QUEUED, holder or '', pttl, is_head and 1 or 0}
    end
  elseif tonumber(call('ZSCORE', HOLDERS, token)) < get_time_ms() + ttl then
    call('ZADD', HOLDERS, string.format('%.0f', get_time_ms() + ttl), token)
    extend_keys(get_time_ms() + ttl)
    raise_recorded_ttl(RECORD, ttl)  -- the record has the handover ttl
    extend_record(RECORD, tonumber(ttl))
  end
  dequeue(token)
  local _, held_fence = read_share(token)
  return {GRANTED, tonumber(held_fence)}

elseif verb == 'release' then
  local tombstone_ttl = ARGV[3]
  read_record()
  local is_ours = is_holder(token) or last_released == token
  dequeue(token)
  local _, _, _, reason = read_share(token)
  if remove_holder(token) and is_ours and not reason and limit then
    last_released = token
    pcall(write_record)
  end
  local retry = hand_out_permits()
  add_tombstone(token, tombstone_ttl)
  return {is_ours and not reason and 1 or 0, retry}

elseif verb == 'heartbeat' then
  read_record()
  return heartbeat(
    function()
      if hand_out_permits() == 1 then return MORE_DEAD_WAITERS end
      -- If the server has evicted the record, only the acquire of a waiter says the limit: the head must ask.
      if is_readable and not limit and select(2, next_waiter(0)) == 1 then return MORE_DEAD_WAITERS end
      return find_next_end(), apply_quarantine() > 0 or not limit
    end,
    is_holder
  )

elseif verb == 'renew' then
  local states = {}
  for i = 1, #KEYS, 3 do
    local pair = (i - 1) / 3 * 2
    local lease_token, ttl = ARGV[pair + 2], tonumber(ARGV[pair + 3])
    HOLDERS, RECORD, SHARES = KEYS[i], KEYS[i + 1], KEYS[i + 2]
    -- A key of a wrong type must not stop the renewal of the others.
    local lease_end = redis.pcall('ZSCORE', HOLDERS, lease_token)
    if type(lease_end) == 'table' then
      states[#states + 1] = lease_end.err
    elseif not lease_end or tonumber(lease_end) <= get_time_ms() then
      -- The lease and its record have vanished together. The sender knows that the lease existed, so the
      -- identity that the sender names is evidence.
      if not lease_end and call('EXISTS', RECORD) == 0 then
        granted_by = '-'
        pcall(apply_quarantine)
      end
      local stored = redis.pcall('GET', RECORD)
      local taken_from, why_taken = string.match(type(stored) == 'string' and stored or '', ' !>%d+ (%S+) (.*)')
      states[#states + 1] = taken_from == lease_token and {REVOKED, why_taken} or NOT_FOUND
    else
      local ok, permits, _, _, reason = pcall(read_share, lease_token)
      if not ok then permits = nil end
      if not permits or reason then
        states[#states + 1] = permits and {REVOKED, reason} or NOT_FOUND
      else
        if tonumber(lease_end) < get_time_ms() + ttl then
          -- First, because for lack of memory the server refuses ZADD only as the first write of a script.
          extend_keys(get_time_ms() + ttl)
          call('ZADD', HOLDERS, string.format('%.0f', get_time_ms() + ttl), lease_token)
        end
        if #KEYS == 3 then raise_recorded_ttl(RECORD, ttl) end  -- an extension comes alone
        extend_record(RECORD, ttl)
        states[#states + 1] = GRANTED
      end
    end
  end
  return states

elseif verb == 'execute' then
  local permits, _, _, reason = read_share(token)
  return execute_command(permits and is_holder(token) and not reason)

elseif verb == 'revoke' then
  local force, reason = ARGV[3], ARGV[4]
  read_record()
  local named_evidence = string.match(token, '^!quarantine:(.*>)')
  if named_evidence then
    local left_ms, evidence = apply_quarantine()
    -- The message ends only the quarantine that it names: it may be late, and its sender may have seen the server
    -- before another change.
    if force ~= '1' or left_ms == 0 or string.match(evidence, '.*>') ~= named_evidence then return {0, left_ms} end
    -- The sender states that no lost lease is alive, so the record names this identity from now on. The fences of lost
    -- grants are below the clock as it will be when the quarantine would have ended, or were counted up from the
    -- record's fence. The new fence passes both.
    granted_by, fence = IDENTITY, math.max(fence + 1000000, get_time_us() + left_ms * 1000)
    write_record(0)
    hand_out_permits()
    return {1, 0}
  end
  local permits, held_fence, channel, _, later_words = read_share(token)
  if not permits or not is_holder(token) then return {0, 0} end
  local left_ms = math.ceil(call('ZSCORE', HOLDERS, token) - get_time_ms())
  if force == '1' then
    dequeue(token)
    remove_holder(token)
    -- A holder without a channel asks, and finds the reason here for as long as its lease would have lasted.
    if record and is_readable then
      local ends_ms = get_time_ms() + math.max(0, left_ms)
      tail = string.format('%s !>%.0f %s %s', (split_free_text(tail)), ends_ms, token, reason)
      write_record(0)
    end
    hand_out_permits()
  else
    call('HSET', SHARES, token, string.format('%d %s %s%s !%s', permits, held_fence, channel, later_words, reason))
  end
  publish(channel, 'revoked ' .. token .. ' !' .. reason)
  return {1, left_ms}

elseif verb == 'holders' then
  local from_ms, max_holders = ARGV[2], ARGV[3]
  return call('ZRANGEBYSCORE', HOLDERS, from_ms, '+inf', 'WITHSCORES', 'LIMIT', 0, max_holders)

elseif verb == 'limit' then
  local wanted_kind, wanted_limit = ARGV[3], tonumber(ARGV[4])
  if not read_record() or kind and kind ~= wanted_kind then return {WRONG_KIND, record} end
  if not call('ZSCORE', TOMBSTONES, token) then  -- a late copy must not undo a limit that somebody has set since
    kind, limit = wanted_kind, wanted_limit
    write_record(0)
    add_tombstone(token, tostring(RECORD_TTL_MS))
    hand_out_permits()
  end
  return {GRANTED, limit}

elseif verb == 'keys' then
  return call('COMMAND', 'GETKEYS', unpack(ARGV, 2))

elseif verb == 'inspect' then
  local max_waiters = ARGV[2]
  read_record()
  hand_out_permits()
  local holders, handed_over, wants = {}, {}, {}
  local found = call('ZRANGE', HOLDERS, 0, max_waiters - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local holder, ends_ms = found[i], found[i + 1]
    handed_over[holder] = call('ZSCORE', QUEUE, holder) and true or nil
    holders[#holders + 1] = holder
    holders[#holders + 1] = math.max(0, math.floor(ends_ms - get_time_ms()))
    holders[#holders + 1] = call('HGET', SHARES, holder) or ''
    holders[#holders + 1] = handed_over[holder] and 1 or 0
  end
  --include living
  for i, waiter in ipairs(waiters) do
    wants[#wants + 1] = waiter
    wants[#wants + 1] = string.match(entries[i], '^%d+ %d+ %d %S+ (%d+)') or ''
  end
  local left_ms, evidence = apply_quarantine()
  return {call('GET', RECORD) or '', read_sum(), call('ZCARD', HOLDERS), waiting, holders, wants,
    left_ms, left_ms > 0 and '!quarantine:' .. evidence or '', departed}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
