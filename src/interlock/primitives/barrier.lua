-- The barrier: so many parties wait for each other, and go on together; again and again.
--
-- Theory. Arrivals are numbered. Those up to `passed` went through; when `parties` more have come, they pass as well. An
-- arrival stays known for a while after that, so that one whose answer was lost hears that it passed, and is not
-- taken for another arrival. Who waits vouches for itself; whoever comes and finds one that no longer does
-- breaks the barrier, and so does one that leaves. It stays broken until it is reset, which begins another
-- generation. Who is to be told of either is woken a bounded number in one step, in order of arrival (`told`); each
-- that comes back goes on with it, and one whose message is lost finds out with its next vouch.
--
-- KEYS   1 barrier  hash     parties, arrivals, passed, told, why (it is broken)
--        2 record   string  "1 barrier <generation>"
--        3 queue    zset    token of an arrival -> its number
--        4 waiters  hash    as in queue.lua; it "wants" its index
--        5 gone     zset    also those whom a reset sent away, and the operations that were done
--        6 present  zset    token of who waits -> alive until, ms
-- ARGV   1 verb, then
--   acquire  token  ttl ms  life ms  heard 0|1  channel  wait 0|1  parties  generation
--                             `generation`: in which it has arrived already, or ""
--                             RETURN {GRANTED, index} | {QUEUED, arrived, 1000, 0, generation}
--                                  | {BROKEN, why} | {LIMIT, parties} | {MISUSED, record}
--   release  token  gone ms   RETURN {0, 0}     one that waits breaks it by this
--   vouch    channel  heard 0|1  (token  life ms)...
--                             RETURN {1000, head's token | "", state...}
--   reset    operation        RETURN {done 0|1} | {MISUSED, record}     once for each operation
--   revoke   operation  why   RETURN {done 0|1}   not done: it is broken, or there is none     once for each operation
--   inspect  most             RETURN {generation | "", parties, arrived, why | "", token...}

--include queue

local BARRIER, PRESENT = KEYS[1], KEYS[6]
local BROKEN, KNOWN_MS = 10, 60000
local generation, text, parties, arrivals, passed, told, why
local rest = ''  -- what follows the words of the record that this version knows

-- Whether there is none, or one that is ours to read: then the variables above are its own.
local function read()
  text = call('GET', RECORD)
  local number, more = string.match((text or '') .. ' ', '^1 barrier (%d+)( .*)')
  if text and not number then return false end
  local stored = call('HMGET', BARRIER, 'parties', 'arrivals', 'passed', 'told', 'why')
  if text and stored[1] then
    generation, rest, parties = number, string.sub(more, 1, -2), tonumber(stored[1])
    arrivals, passed, told, why = tonumber(stored[2]), tonumber(stored[3]), tonumber(stored[4]), stored[5]
  end
  return true
end

local function keep()
  call('PEXPIRE', RECORD, RECORD_MS)
  call('PEXPIRE', BARRIER, RECORD_MS)
  for _, key in ipairs({QUEUE, WAITERS, PRESENT}) do call('PEXPIRE', key, KNOWN_MS) end
end

local function write()
  call('SET', RECORD, '1 barrier ' .. generation .. rest, 'PX', RECORD_MS)
  call('HSET', BARRIER, 'parties', parties, 'arrivals', arrivals, 'passed', passed, 'told', told)
  if why then call('HSET', BARRIER, 'why', why) else call('HDEL', BARRIER, 'why') end
  keep()
end

-- Those who came after this number, up to that one: some of them.
local function some(from, to)
  return call('ZRANGEBYSCORE', QUEUE, '(' .. from, to, 'LIMIT', 0, SKIP)
end

local function rouse(who)
  local channel = string.match(call('HGET', WAITERS, who) or '', '^%d+ %d+ %d (%S+)')
  if channel then tell(channel, 'granted ' .. who) end
end

-- Go on with telling those who passed, or everybody if it is broken.
local function wake()
  local last = why and arrivals or passed
  if told >= last then return end
  local found = some(told, last)
  for _, who in ipairs(found) do rouse(who) end
  told = #found == SKIP and tonumber(call('ZSCORE', QUEUE, found[SKIP])) or last
  call('HSET', BARRIER, 'told', told)
end

local function break_for(reason)
  why = reason
  call('DEL', PRESENT)
  call('HSET', BARRIER, 'why', why)
  wake()
end

-- Break it if somebody who waits is not heard of any more.
local function check()
  if why or arrivals == passed then return end
  local dead = call('ZRANGEBYSCORE', PRESENT, '-inf', string.format('%.0f', micros() / 1000), 'LIMIT', 0, 1)[1]
  if dead or call('ZCARD', PRESENT) < arrivals - passed then
    break_for('a party is not heard of any more: ' .. (dead or 'the server has lost it'))
  end
end

local function alive(who)
  call('ZADD', PRESENT, string.format('%.0f', micros() / 1000 + ALIVE_MS), who)
end

-- Forget some of those who passed long ago.
local function forget()
  local now = micros() / 1000
  for _, who in ipairs(some(0, passed)) do
    local until_ms = string.match(call('HGET', WAITERS, who) or '0', '^%d+')
    if until_ms + KNOWN_MS > now then return end
    leave(who)
  end
end

if verb == 'acquire' then
  local life, heard, channel, wait = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local wanted, arrived_in = tonumber(ARGV[8]), ARGV[9]
  if not read() then return {MISUSED, text} end
  local number = generation and tonumber(call('ZSCORE', QUEUE, token) or nil)
  if number then  -- the same request again
    keep()  -- before the first write: one that is here already needs no memory
    if number > passed then
      if not why then alive(token) end
      check()
    end
    wake()
    if number <= passed then
      return {GRANTED, tonumber(string.match(call('HGET', WAITERS, token) or '', '^%d+ %d+ %d %S+ (%d+)') or 0)}
    end
    if not why and wait ~= '1' then break_for('the time of a party was over: ' .. token) end
    if why then return {BROKEN, why} end
    enqueue(token, life, heard, channel, string.format(' %d', number - passed - 1))
    keep()
    return {QUEUED, arrivals - passed, 1000, 0, generation}
  end
  if call('ZSCORE', GONES, token) then return {BROKEN, 'it was reset, or this party has left'} end
  if arrived_in ~= '' and arrived_in ~= generation then
    return {BROKEN, 'it was reset, or the server has lost it'}
  end
  if not generation then
    generation, parties, arrivals, passed, told = string.format('%.0f', micros()), wanted, 0, 0, 0
    call('SET', RECORD, '1 barrier ' .. generation, 'PX', RECORD_MS)
    call('DEL', BARRIER, QUEUE, WAITERS, PRESENT)
  end
  check()
  if why then return {BROKEN, why} end
  if arrived_in ~= '' then return {BROKEN, 'the server does not know any more that this party came'} end
  if parties ~= wanted and arrivals > passed then return {LIMIT, parties} end
  parties = wanted  -- nobody waits, so nobody counts on another number
  forget()
  arrivals = arrivals + 1
  local index = arrivals - passed - 1
  write()  -- if there is no memory, this fails, and nothing was done
  call('ZADD', QUEUE, arrivals, token)
  enqueue(token, life, heard, channel, ' ' .. index)
  if index == parties - 1 then
    call('DEL', PRESENT)
    passed = arrivals
  else
    alive(token)
    if wait ~= '1' then
      break_for('a party came that could not wait: ' .. token)
      keep()
      return {BROKEN, why}
    end
  end
  write()
  wake()
  if passed == arrivals then return {GRANTED, index} end
  return {QUEUED, index + 1, 1000, 0, generation}

elseif verb == 'release' then
  if read() and generation then
    local number = tonumber(call('ZSCORE', QUEUE, token) or 0)
    if number > passed then
      if not why then break_for('a party left, or its time was over: ' .. token) end
      leave(token)
    end
  end
  bury(token, ARGV[3])
  return {0, 0}

elseif verb == 'vouch' then
  read()
  if generation then keep() end  -- before the first write: who waits already needs no memory
  return vouch(
    function()
      if generation then
        for i = 4, #ARGV, 2 do
          if call('ZSCORE', PRESENT, ARGV[i]) then alive(ARGV[i]) end
        end
        check()
        wake()
        keep()
      end
      return 1000
    end,
    function(who) return not generation or why or tonumber(call('ZSCORE', QUEUE, who) or 0) <= passed end
  )

elseif verb == 'reset' then
  if not read() then return {MISUSED, text} end
  if not generation or call('ZSCORE', GONES, token) then return {0} end
  for _, who in ipairs(some(passed, arrivals)) do rouse(who) end
  for _, who in ipairs(call('ZRANGEBYSCORE', QUEUE, '(' .. passed, '+inf')) do
    leave(who)
    redis.pcall('ZADD', GONES, string.format('%.0f', micros() / 1000 + KNOWN_MS), who)  -- a late copy is no arrival
  end
  call('DEL', PRESENT)
  generation = string.format('%.0f', math.max(generation + 1, micros()))
  passed, told, why = arrivals, arrivals, nil
  rest = ''
  write()
  bury(token, tostring(KNOWN_MS))
  return {1}

elseif verb == 'revoke' then
  if call('ZSCORE', GONES, token) then return {1} end
  if not read() or not generation or why then return {0} end
  break_for(ARGV[3])
  bury(token, tostring(KNOWN_MS))
  return {1}

elseif verb == 'inspect' then
  if not read() then return redis.error_reply('WRONGTYPE ' .. text) end
  if generation then
    check()
    wake()
  end
  return {generation or '', parties or 0, (arrivals or 0) - (passed or 0), why or '',
    unpack(call('ZRANGEBYSCORE', QUEUE, '(' .. (passed or 0), '+inf', 'LIMIT', 0, ARGV[2]))}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
