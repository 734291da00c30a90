-- The plain key: a lock whose state is one string key that clients of other libraries know, and a queue beside the key.
--
-- Theory. A client of another library acquires the lock by `SET key value NX`, and releases it by DEL. Such a client
-- knows nothing of the queue, so this script hands nothing over: a release deletes the key and wakes the head of the
-- queue. The head then competes with the clients of other libraries. Among the clients of this script only the head of
-- the queue may take the key, so they are served in order of arrival. A foreign holder, whose DEL wakes nobody, is one
-- that this script did not grant the key to; while a foreign holder has the key, the head polls for all who wait here.
--
-- A woken head comes sooner than any poll of another library, so the clients of this script could keep the key for
-- ever. Therefore they take it one after another only for a bounded time, a run. The release that ends a run opens a
-- gap: for some ms only clients of other libraries may take the key. A run is short while foreign holders are about,
-- and long if this script has seen none lately. The clients of other libraries get a run, too: after it, the head polls
-- as often as all waiters of the queue would together, or the queue would have the chance of one client only.
--
-- Clients of python-redis-lock do not poll: they block in BLPOP on a signal list, and a release pushes an element into
-- it. With such a library nobody stands in the queue: all waiters block in BLPOP, and the server keeps their order.
--
-- Rules.
-- (a) Every message may arrive twice or late. A second or a late copy changes nothing more.
-- (b) While anybody alive waits, only the head of the queue may take a free key, and not in a gap.
-- (c) The script writes its state first and publishes last.
-- (d) Every key but the lock itself has a TTL; the lock has none if its holder asked for none.
--
-- KEYS   1 lock     string  the value of the holder, as the other library writes it
--        2 record   string  "1 plain <attempt> <run since> <foreign seen> <gap until> !<value>": which attempt took the
--                           key last, and with which value; and three times, ms, 0 if there is none: since when the
--                           run lasts, when a foreign holder was last seen, until when the gap lasts; since when the
--                           foreign holders have their run, if a gap did not begin it, is in the place of the last one
--        3 queue    zset    as in queue.lua
--        4 waiters  hash    as in queue.lua; a waiter wants its poll interval, ms
--        5 gone     zset    as in queue.lua
--        6 [signal] list    only of a library whose waiters block in BLPOP: an element wakes the waiter that has blocked
--                           for longest, of that library or of interlock; then nobody stands in the queue
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply
--   acquire  token  ttl ms  handover ttl ms  subscribed 0|1  channel  max waiters  value  poll ms
--                             RETURN {GRANTED} | {QUEUED | BUSY, value | "", ms until the head looks again, head 0|1}
--                                  | {RETRY} | {NOT_FOUND} | {WRONG_KIND, record}
--                             ttl: "0" is none; max waiters: "0": the caller does not wait; else "inf"
--                             NOT_FOUND: the token has a tombstone
--   release  token  tombstone ttl ms  value  whose  [signal ms]
--                             RETURN {the key was the sender's 0|1, ask again 0|1}
--                             deletes the key if it is the sender's, and wakes the head of the queue; also takes a
--                             waiter out of the queue. whose: "attempt": it is the sender's if it has this value, and
--                             the attempt of this token took it last; "holder": if it has this value, unless another
--                             attempt took it with that value; "value": if it has this value; "any": in any case;
--                             "not-lease": unless it has the value of an interlock lease; "none": in no case.
--                             signal ms: how long the element of the signal list lasts
--   extend   value  ttl ms    RETURN {GRANTED} | {NOT_FOUND} | {NO_EXPIRY}
--                             sets the key's ttl if the key has this value and a ttl
--   signal   signal ms  push 0|1
--                             RETURN {ms until the key may be free, 0 if it is free and no element is in the list}
--                             with push: wakes a waiter if it is 0
--   heartbeat  channel  subscribed 0|1  (token  handover ttl ms)...
--                             RETURN {ms until the next heartbeat | MORE_DEAD_WAITERS, head's token | "", state...}
--                             state: QUEUED | RETRY | NOT_FOUND. The head asks: it may have just become the head

--include message

local LOCK, SIGNAL = KEYS[1], KEYS[6]

-- The plain cases, before all functions as in lock_plain_cases.lua: a free key, or the release of a key, while nobody
-- waits. These lines do what the verbs below do then.
if verb == 'acquire' and call('EXISTS', LOCK, QUEUE, TOMBSTONES) == 0 then
  local ttl, value, last = ARGV[3], ARGV[8], call('GET', RECORD)
  local foreign_seen = last and string.match(last, '^1 plain %S+ %d+ (%d+) %d+ !') or not last and '0'
  if foreign_seen then
    call('SET', RECORD, '1 plain ' .. token .. ' 0 ' .. foreign_seen .. ' 0 !' .. value, 'PX', RECORD_TTL_MS + ttl)
    if ttl == '0' then call('SET', LOCK, value) else call('SET', LOCK, value, 'PX', ttl) end
    return {GRANTED}
  end
elseif verb == 'release' and not SIGNAL and ARGV[3] == '0' and ARGV[5] == 'value' and call('GET', LOCK) == ARGV[4]
  and call('EXISTS', QUEUE, TOMBSTONES) == 0
then
  call('DEL', LOCK)
  return {1, 0}
end

--include queue

-- SHORT_RUN_MS, LONG_RUN_MS: how long a run lasts while foreign holders are about, and else. FOREIGN_MS: for how long
-- after the last foreign holder they count as being about. MAX_GAP_MS: the longest gap. LOOK_MS: when the head looks
-- again if the key says nothing about its end. MIN_LOOK_MS: when it looks again at the earliest, unless its caller
-- polls as often.
local SHORT_RUN_MS, LONG_RUN_MS, FOREIGN_MS, MAX_GAP_MS, LOOK_MS, MIN_LOOK_MS = 1000, 10000, 60000, 100, 1000, 5

local record, tail, is_readable = nil, '', true
local acquired_by, run_since, foreign_seen, gap_until, own_value = '-', 0, 0, 0, nil

-- Reads the record into the variables above. Returns false if another version or another kind of primitive owns it.
local function read_record()
  record = call('GET', RECORD)
  if not record then return true end
  local attempt, since, seen, gap, rest = string.match(record, '^1 plain (%S+) (%d+) (%d+) (%d+)(.*)$')
  is_readable = attempt ~= nil
  if not is_readable then return false end
  acquired_by, run_since, foreign_seen, gap_until = attempt, tonumber(since), tonumber(seen), tonumber(gap)
  tail, own_value = split_free_text(rest)
  return true
end

local function write_record(ttl)
  if not is_readable then return end
  local text = string.format('1 plain %s %.0f %.0f %.0f%s', acquired_by, run_since, foreign_seen, gap_until, tail)
  -- Not in format(), which ends a value at a zero byte.
  call('SET', RECORD, text .. (own_value and ' !' .. own_value or ''), 'PX', RECORD_TTL_MS + ttl)
end

local function now_ms()
  return math.floor(get_time_us() / 1000)
end

-- Notes a foreign holder, which ends the run. At most one write a second says nothing new.
local function note_holder(value)
  if value == own_value or run_since == 0 and gap_until > 0 and now_ms() - foreign_seen < LOOK_MS then return end
  run_since, foreign_seen, gap_until = 0, now_ms(), gap_until > 0 and gap_until or now_ms()
  write_record(0)
end

-- Returns after how many ms the head must look at the key again, which has this value.
local function look_after(value, poll_ms)
  local pttl = call('PTTL', LOCK)
  local left_ms = pttl >= 0 and math.max(1, pttl) or LOOK_MS
  if value == own_value then return left_ms end
  if now_ms() - gap_until >= SHORT_RUN_MS then
    local shared_ms = math.floor(poll_ms / math.max(1, call('ZCARD', QUEUE)))
    poll_ms = math.max(math.min(poll_ms, MIN_LOOK_MS), shared_ms)
  end
  return math.min(left_ms, poll_ms)
end

-- Wakes this waiter, as next_waiter() returns it: a hint to ask.
local function wake(waiter)
  publish(waiter[3], 'granted ' .. waiter[1])
end

-- Opens a gap before this waiter, which is the head of the queue, if the run has lasted for long enough.
local function end_run(head)
  local run_ms = now_ms() - foreign_seen < FOREIGN_MS and SHORT_RUN_MS or LONG_RUN_MS
  if run_since > 0 and now_ms() - run_since >= run_ms then
    run_since, gap_until = 0, now_ms() + math.min(MAX_GAP_MS, tonumber(head[4]))
    pcall(write_record, 0)  -- without memory there is no gap
  end
end

-- Whether the key has the value of an interlock lease: a token, or a marker.
local function is_lease(value)
  local random = string.match(value, '/%d+/[^/ ]+/(%x+)$')
  return string.sub(value, 1, 1) == '!' or random and #random == 32
end

local function is_senders(stored, value, whose)
  if whose == 'any' or whose == 'none' then return whose == 'any' end
  if whose == 'not-lease' then return not is_lease(stored) end
  return stored == value and (
    whose == 'value'
    or acquired_by == token  -- "attempt" and "holder"
    or whose == 'holder' and own_value ~= value
  )
end

-- Wakes the waiter that has blocked in BLPOP for longest. Returns an error if that can't be done; but without memory a
-- waiter only wakes later, by the verb `signal`.
local function signal(ms)
  call('DEL', SIGNAL)
  local pushed = redis.pcall('LPUSH', SIGNAL, 1)
  if type(pushed) == 'number' then
    call('PEXPIRE', SIGNAL, ms)
  elseif not string.find(pushed.err, 'OOM', 1, true) then
    return pushed
  end
end

if verb == 'acquire' then
  local ttl, handover_ttl, subscribed, channel, max_waiters = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local value, poll_ms = ARGV[8], ARGV[9]
  if not read_record() then return {WRONG_KIND, record} end
  local has_queue_or_tombstones = call('EXISTS', QUEUE, TOMBSTONES) > 0
  if has_queue_or_tombstones and call('ZSCORE', TOMBSTONES, token) then return {NOT_FOUND} end
  local stored, look_ms = call('GET', LOCK), LOOK_MS
  if stored == value and acquired_by == token then return {GRANTED} end  -- a second copy of the request
  if stored then
    note_holder(stored)
    look_ms = look_after(stored, tonumber(poll_ms))
  else
    local head, retry
    if has_queue_or_tombstones then head, retry = next_waiter(0) end
    if retry == 1 then return {RETRY} end
    local gap_ms = head and gap_until - now_ms() or 0
    if gap_ms <= 0 and (not head or head[1] == token) then
      run_since = head and (run_since > 0 and run_since or now_ms()) or 0
      acquired_by, own_value, gap_until = token, value, 0
      write_record(tonumber(ttl))
      -- The lock's key is the last write: if the server has no memory for both keys, nothing is granted.
      if ttl == '0' then call('SET', LOCK, value) else call('SET', LOCK, value, 'PX', ttl) end
      if has_queue_or_tombstones then dequeue(token) end
      return {GRANTED}
    end
    if gap_ms > 0 then look_ms = gap_ms else wake(head) end
  end
  if max_waiters == '0' then return {BUSY, stored or '', look_ms, 0} end
  local is_head = enqueue(token, handover_ttl, subscribed, channel, ' ' .. poll_ms)
  return {QUEUED, stored or '', look_ms, is_head and 1 or 0}

elseif verb == 'release' then
  local tombstone_ttl, value, whose = ARGV[3], ARGV[4], ARGV[5]
  read_record()
  local stored, retry = call('GET', LOCK), 0
  local is_ours = stored and is_senders(stored, value, whose)
  local has_queue_or_tombstones = call('EXISTS', QUEUE, TOMBSTONES) > 0
  if has_queue_or_tombstones then dequeue(token) end
  -- Also if nobody has the key, as below.
  local failed = SIGNAL and (is_ours or not stored) and signal(ARGV[6])
  if failed then return failed end
  if is_ours then call('DEL', LOCK) end
  -- Also if nobody has the key: the waiter that leaves may be the one that was woken.
  if has_queue_or_tombstones and (is_ours or not stored) then
    local head
    head, retry = next_waiter(0)
    if head then
      end_run(head)
      wake(head)
    end
  end
  add_tombstone(token, tombstone_ttl)
  return {is_ours and 1 or 0, retry}

elseif verb == 'extend' then
  local value, ttl = ARGV[2], ARGV[3]
  if call('GET', LOCK) ~= value then return {NOT_FOUND} end
  if call('PTTL', LOCK) < 0 then return {NO_EXPIRY} end
  call('PEXPIRE', LOCK, ttl)
  return {GRANTED}

elseif verb == 'signal' then
  local pttl = call('PTTL', LOCK)
  if pttl ~= -2 then return {pttl >= 0 and math.max(1, math.min(pttl, LOOK_MS)) or LOOK_MS} end
  if call('EXISTS', SIGNAL) == 1 then return {LOOK_MS} end
  return ARGV[3] == '1' and signal(ARGV[2]) or {0}

elseif verb == 'heartbeat' then
  return heartbeat(
    function()
      if not read_record() then return LOOK_MS, true end  -- the head asks, and gets the error
      local stored = call('GET', LOCK)
      local head, retry = next_waiter(0)
      if retry == 1 then return MORE_DEAD_WAITERS end
      if stored then
        note_holder(stored)
      elseif head and gap_until <= now_ms() then
        wake(head)
      end
      return LOOK_MS, true
    end,
    function() return false end
  )
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
