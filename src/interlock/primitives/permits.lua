-- Permits: up to a limit, held by many, with one queue for all. A semaphore; and a read-write lock, whose readers take
-- one permit each and whose writer takes them all.
--
-- Theory. Holders stand in a sorted set by when their leases end, so each goes alone, by the server's clock. What each
-- has is in a hash, with the sum. Whoever gives permits back, or finds some that have run out, hands what is free
-- to the queue, strictly in order of arrival: while the oldest does not fit, nobody behind it is let in. So a large
-- request (or a writer) can't starve, and neighbouring small ones (readers) enter together. A handover is a short
-- grant until it is confirmed, as with the lock, and a confirmation goes on with handing out.
--
-- Rules. As in lock.lua. And: (7) the sum is changed together with the share that it counts, never apart. (8) The
-- limit is what the record says; a client with another is told so.
--
-- KEYS   1 holders  zset    token of a holder -> end of its lease, ms
--        2 record   string  "1 <kind> <fence> <identity> <ttl ms> <last released> <limit>"; or kind "unknown", limit 0: who
--                           began or ended a quarantine did not know
--        3 queue    zset    as in queue.lua; a waiter wants "<permits>"
--        4 waiters  hash
--        5 gone     zset
--        6 shares   hash    token of a holder -> "<permits> <fence> <channel>[ !<why revoked>]"; "sum" -> their sum
--        ... for `renew`: holders, record, shares, ... of many instead; for `execute`: its keys follow
-- ARGV   1 verb, then
--   acquire  token  ttl ms  life ms  heard 0|1  channel  wait 0|1  kind  permits  limit  own
--                             `own`: a lease of the same reader or writer, beside which it may read; or ""
--                             RETURN {GRANTED, fence} | {QUEUED | BUSY, a holder, pttl of the next end, head 0|1}
--                                  | {AGAIN} | {GONE} | {REVOKED, why} | {MISUSED, record} | {LIMIT, limit}
--   release  token  gone ms   RETURN {was it ours 0|1, again 0|1}     also takes a waiter out of the queue
--   vouch    channel  heard 0|1  (token  life ms)...
--                             RETURN {pttl of the next end | MORE, head's token | "", state...}
--   renew    (token  ttl ms)...     RETURN {state...}   state: GRANTED | GONE | {REVOKED, why} | error text
--   execute  token  command  argument...    RETURN {GRANTED, reply} | {GONE}
--   revoke   token  force 0|1  why          RETURN {done 0|1, ms left}   `token`: or "!quarantine:<evidence>", as inspected
--   limit    operation  kind  limit         RETURN {GRANTED, limit} | {MISUSED, record}   once for each operation
--   keys     command  argument...           RETURN {key...}   which of the arguments are keys
--   inspect  most             RETURN {record | "", sum, number of holders, number of waiters,
--                                     {holder, ms left, its share, ...}, {waiter, what it wants, ...},
--                                     ms of quarantine left, "!quarantine:<evidence>" | ""}

--include queue

local HOLDERS, SHARES = KEYS[1], KEYS[6]
-- What the record says, once read() was called; `rest` is what follows the words that this version knows.
local fence, under, lasts, released, limit, kind, rest, text = 0, '-', '0', '-', nil, nil, '', nil
local legible = true
local now_ms

local function now()
  now_ms = now_ms or micros() / 1000
  return now_ms
end

-- Whether the record is missing or ours to read: of this version, and of permits. The script leaves any other record as
-- it is, and grants nobody anything.
local function read()
  text = call('GET', RECORD)
  if not text then return true end
  local k, f, i, t, r, l, more = string.match(text, '^1 (%a+) (%d+) (%S+) (%d+) (%S+) (%S+)(.*)')
  legible = (k == 'semaphore' or k == 'rwlock' or k == 'unknown') and tonumber(l) ~= nil
  if not legible then return false end
  if k ~= 'unknown' then kind, limit = k, tonumber(l) end
  fence, under, lasts, released, rest = tonumber(f), i, t, r, more
  return true
end

-- The only function that stores the record. The record outlives a lease of `ttl` ms by RECORD_MS, and ends after the
-- clock has reached the fence, even if the clock was set back.
local function write(ttl)
  local ms = math.max(RECORD_MS + ttl + math.max(0, math.ceil(fence / 1000 - now())), call('PTTL', RECORD))
  local value = string.format(
    '1 %s %.0f %s %s %s %d%s', kind or 'unknown', fence, under, lasts, released, limit or 0, rest
  )
  call('SET', RECORD, value, 'PX', string.format('%.0f', ms))
end

-- The share of this token: permits, fence, channel, the reason of a revocation, the words of a later version. Or nothing.
local function share(who)
  local permits, f, channel, more = string.match(call('HGET', SHARES, who) or '', '^(%d+) (%d+) (%S+)(.*)')
  if not permits then return end
  local beside, why = parted(more)
  return tonumber(permits), f, channel, why, beside
end

local function sum()
  return tonumber(call('HGET', SHARES, 'sum') or 0)
end

-- Both keys live as long as the longest lease in them.
local function keep(until_ms)
  local ms = math.ceil(math.max(until_ms - now(), call('PTTL', HOLDERS)))
  call('PEXPIRE', HOLDERS, ms)
  call('PEXPIRE', SHARES, ms)
end

local function drop(who)
  local permits = share(who)
  call('ZREM', HOLDERS, who)
  if permits then
    call('HDEL', SHARES, who)
    call('HINCRBY', SHARES, 'sum', -permits)
    if call('EXISTS', HOLDERS) == 0 then call('DEL', SHARES) end
  end
  return permits
end

local function holds(who)
  local ends = call('ZSCORE', HOLDERS, who)
  return ends and tonumber(ends) > now()
end

-- The record is written first: if there is no memory, this is what fails, and nothing else was done.
local function grant(who, permits, ttl, channel)
  fence, under, lasts = next_fence(fence, under), IDENTITY, ttl
  write(ttl)
  call('HINCRBY', SHARES, 'sum', permits)
  call('HSET', SHARES, who, string.format('%d %.0f %s', permits, fence, channel))
  call('ZADD', HOLDERS, string.format('%.0f', now() + ttl), who)
  keep(now() + ttl)
end

-- Those whose leases have run out are dropped; 1 if there are more than one step takes.
local function expire()
  if call('EXISTS', HOLDERS) == 0 then call('DEL', SHARES) end
  local over = call('ZRANGEBYSCORE', HOLDERS, '-inf', string.format('%.0f', now()), 'LIMIT', 0, SKIP)
  for _, who in ipairs(over) do drop(who) end
  return #over == SKIP and 1 or 0
end

-- For how many ms nothing may be granted, see barred(); the record keeps the evidence, which others may not have.
local function quarantined()
  if not legible then return 0 end
  local ms, evidence = barred(under, lasts)
  if ms > 0 and under ~= evidence then
    under = evidence
    write(0)
  end
  return ms, evidence
end

-- Hand what is free to the queue, in order. Returns whether to come again, and who does not fit.
local function hand_out()
  local again = expire()
  if again == 1 or not limit then return again end
  if quarantined() > 0 then return again, '!' end
  local free, place = limit - sum(), 0
  for _ = 1, SKIP do
    local first, more = turn(place)
    if not first then return math.max(again, more) end
    local who, life, channel, wants, at = unpack(first)
    if holds(who) then
      place = at + 1  -- granted, and not confirmed yet
    else
      local permits = tonumber(string.match(wants, '^%d+')) or math.huge
      if permits > limit then  -- the limit was lowered: it is woken to hear that
        leave(who)
        tell(channel, 'granted ' .. who)
        place = at
      else
        if permits > free or not pcall(grant, who, permits, life, channel) then return again, who end
        free = free - permits
        push(who, life, channel, wants)
        place = at + 1
      end
    end
  end
  return again, ''
end

-- When the next lease or the quarantine ends, in ms from now, and whose that is; -2: there is none.
local function next_end()
  local ms, evidence = quarantined()
  if ms > 0 then return ms, '!quarantine:' .. evidence end
  local first = call('ZRANGE', HOLDERS, 0, 0, 'WITHSCORES')
  return first[1] and math.max(1, math.ceil(first[2] - now())) or -2, first[1]
end

if verb == 'acquire' then
  local ttl, life, heard, channel, wait = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local what, permits, most, own = ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11]
  if not read() or kind and kind ~= what then return {MISUSED, text} end
  kind = what
  local again = expire()
  if holds(token) then  -- the same request again, or the confirmation of a handover
    leave(token)
    local _, f, _, why = share(token)
    if not f then
      drop(token)
      return {GONE}
    end
    if why then return {REVOKED, why} end
    local ends = now() + ttl
    if tonumber(call('ZSCORE', HOLDERS, token)) <= ends then
      call('ZADD', HOLDERS, string.format('%.0f', ends), token)
      keep(ends)
    end
    hand_out()  -- 32 were let in at most, and each goes on with it here
    return {GRANTED, tonumber(f)}
  end
  if call('ZSCORE', GONES, token) then return {GONE} end
  limit = limit or most
  if limit ~= most then
    leave(token)
    hand_out()
    return {LIMIT, limit}
  end
  local more, before = hand_out()
  if math.max(again, more) == 1 then return {AGAIN} end
  if not holds(token) then
    -- Beside its own lease a reader never waits: a writer that stands in between would wait for it, and it for him.
    local beside = what == 'rwlock' and own ~= '' and permits == 1 and before ~= '!' and holds(own)
    if beside or permits <= limit - sum() and (not before or before == token) then
      grant(token, permits, ttl, channel)
    else
      local pttl, holder = next_end()
      if wait ~= '1' then return {BUSY, holder or '', pttl, 0} end
      enqueue(token, life, heard, channel, ' ' .. permits)
      write(0)
      return {QUEUED, holder or '', pttl, call('ZRANGE', QUEUE, 0, 0)[1] == token and 1 or 0}
    end
  elseif tonumber(call('ZSCORE', HOLDERS, token)) < now() + ttl then
    call('ZADD', HOLDERS, string.format('%.0f', now() + ttl), token)
    keep(now() + ttl)
  end
  leave(token)
  local _, f = share(token)
  return {GRANTED, tonumber(f)}

elseif verb == 'release' then
  read()
  local ours = holds(token) or released == token
  leave(token)
  local _, _, _, why = share(token)
  if drop(token) and ours and not why and limit then
    released = token
    pcall(write, 0)
  end
  local again = hand_out()
  bury(token, ARGV[3])
  return {ours and not why and 1 or 0, again}

elseif verb == 'vouch' then
  read()
  return vouch(
    function()
      if hand_out() == 1 then return MORE end
      return next_end(), quarantined() > 0 or not legible
    end,
    holds
  )

elseif verb == 'renew' then
  local states = {}
  for i = 1, #KEYS, 3 do
    local n = (i - 1) / 3 * 2
    local mine, ttl = ARGV[n + 2], tonumber(ARGV[n + 3])
    HOLDERS, RECORD, SHARES = KEYS[i], KEYS[i + 1], KEYS[i + 2]
    local ends = redis.pcall('ZSCORE', HOLDERS, mine)  -- one key of a wrong type must not stop the others
    if type(ends) == 'table' then
      states[#states + 1] = ends.err
    elseif not ends or tonumber(ends) <= now() then
      if not ends and call('EXISTS', RECORD) == 0 then  -- who knows that it was held is a witness
        under = '-'
        pcall(quarantined)
      end
      states[#states + 1] = GONE
    else
      local fine, permits, _, _, why = pcall(share, mine)
      if not fine then permits = nil end
      if not permits or why then
        states[#states + 1] = permits and {REVOKED, why} or GONE
      else
        if tonumber(ends) < now() + ttl then
          keep(now() + ttl)  -- first: after a write that needs no memory, ZADD is not refused
          call('ZADD', HOLDERS, string.format('%.0f', now() + ttl), mine)
        end
        local least = math.max(RECORD_MS, ttl + RECORD_MS / 2)  -- seldom a write, but for a lease that was extended
        if call('PTTL', RECORD) < least then call('PEXPIRE', RECORD, RECORD_MS + ttl) end
        states[#states + 1] = GRANTED
      end
    end
  end
  return states

elseif verb == 'execute' then
  local permits, _, _, why = share(token)
  return execute(permits and holds(token) and not why)

elseif verb == 'revoke' then
  local force, why = ARGV[3], ARGV[4]
  read()
  local named = string.match(token, '^!quarantine:(.*>)')
  if named then
    local ms, evidence = quarantined()
    -- The message ends only the quarantine that it names: it may be late, and its sender have seen the server before.
    if force ~= '1' or ms == 0 or string.match(evidence, '.*>') ~= named then return {0, ms} end
    -- Somebody knows that nothing is at work: from here on it is as if granted here. Fences go on from where the clock
    -- would be after all of the quarantine, and pass those of lost grants, though the clock may be behind or they counted.
    under, fence = IDENTITY, math.max(fence + 1000000, micros() + ms * 1000)
    write(0)
    hand_out()
    return {1, 0}
  end
  local permits, f, channel, _, beside = share(token)
  if not permits or not holds(token) then return {0, 0} end
  local left = math.ceil(call('ZSCORE', HOLDERS, token) - now())
  if force == '1' then
    leave(token)
    drop(token)
    hand_out()
  else
    call('HSET', SHARES, token, string.format('%d %s %s%s !%s', permits, f, channel, beside, why))
  end
  tell(channel, 'revoked ' .. token .. ' !' .. why)
  return {1, left}

elseif verb == 'limit' then
  local what, wanted = ARGV[3], tonumber(ARGV[4])
  if not read() or kind and kind ~= what then return {MISUSED, text} end
  if not call('ZSCORE', GONES, token) then  -- a late copy must not undo what somebody set since
    kind, limit = what, wanted
    write(0)
    bury(token, tostring(RECORD_MS))
    hand_out()
  end
  return {GRANTED, limit}

elseif verb == 'keys' then
  return keys()

elseif verb == 'inspect' then
  local most = ARGV[2] - 1
  read()
  hand_out()
  local holders, waiters = {}, {}
  for i, each in ipairs(call('ZRANGE', HOLDERS, 0, most, 'WITHSCORES')) do
    if i % 2 == 1 then
      holders[#holders + 1] = each
    else
      holders[#holders + 1] = math.max(0, math.floor(each - now()))
      holders[#holders + 1] = call('HGET', SHARES, holders[#holders - 1]) or ''
    end
  end
  for _, each in ipairs(call('ZRANGE', QUEUE, 0, most)) do
    waiters[#waiters + 1] = each
    waiters[#waiters + 1] = string.match(call('HGET', WAITERS, each) or '', '^%d+ %d+ %d %S+ (%d+)') or ''
  end
  local ms, evidence = quarantined()
  return {call('GET', RECORD) or '', sum(), call('ZCARD', HOLDERS), call('ZCARD', QUEUE), holders, waiters,
    ms, ms > 0 and '!quarantine:' .. evidence or ''}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
