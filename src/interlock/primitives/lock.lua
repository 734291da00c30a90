-- The lock: one holder, and a queue in the server that hands the lock over.
--
-- Theory. The lock is a plain string key whose value is the holder's token. So the lock and every client that uses `SET
-- key token NX PX` exclude each other. A sorted set holds the waiters in order of arrival. The request that ends a
-- lease hands the lock to the oldest live waiter in the same step, and wakes only that waiter: no newcomer can
-- overtake, and no crowd wakes for one grant. A handover is a short grant, for the waiter's handover ttl. The waiter
-- confirms the grant by sending its acquire again, and so gets the full ttl. Therefore a lock that was handed to a dead
-- process is free again within seconds.
--
-- Rules.
-- (a) Every message may arrive twice or late. A second or a late copy changes nothing more.
-- (b) Any request that finds the lock's key absent hands the lock to the head of the queue.
-- (c) The script writes its state first and publishes last, because PUBLISH may fail.
-- (d) Every key has a TTL.
-- (e) Only the holder's requests change the TTL of its lease, and they only lengthen it.
-- (f) Every decision uses the server's clock.
-- (g) A client with the same owner name may take the lock over, because an owner counts as one holder. Every other
--     client waits until the earlier lease has run out.
-- (h) While leases that this server has lost may be alive, the script grants nothing: a marker holds the lock.
-- (i) In a quorum, voter.lua judges that for all names at once, before each verb that counts.
--
-- KEYS   1 lock     string  "<token>" of the holder; "!<token>" after a revocation; "!taken-over" by rule (g);
--                           "!quarantine:<evidence>" by rule (h)
--        2 record   string  "1 <kind> <fence> <identity> <ttl ms> <last released> <holder> <channel>[ !<why revoked>]",
--                           or in place of that " !><until, ms> <token> <why>" of the lease that was last taken by force:
--                           fence, identity of the server and ttl of the last grant, the token released last, the
--                           holder's token and channel; "-" is none. In a quarantine, the identity is the evidence, see
--                           decide_quarantine(). The kind is "unknown" if a quarantine ended where no record was.
--        3 queue    zset    as in queue.lua
--        4 waiters  hash    as in queue.lua; a waiter wants "<kind> <ttl ms>"; the entry of an earlier version
--                           has "<kind>" or "<kind> @<number>"
--        5 gone     zset    as in queue.lua; and "ousted" -> until when the holder that lost the lock by rule (g) may
--                           rely on its lease, ms
--        ... for `renew`: lock, record, lock, record, ... of many locks instead; for `execute`: its keys follow
--        ... and last, in a quorum: voter, of the voter record, see message.lua
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply
--   acquire  token  ttl ms  handover ttl ms  subscribed 0|1  channel  max waiters  owner  kind
--                             RETURN {GRANTED, fence} | {QUEUED | BUSY, holder, its pttl ms, head 0|1} | {RETRY}
--                                  | {NOT_FOUND} | {REVOKED, why} | {NO_EXPIRY, value} | {WRONG_KIND, record}
--                                  | {CROWDED, number of waiters}
--                             max waiters: "0": the caller does not wait; "inf": there is no bound
--                             owner: takes over from a holder whose token begins with this text; "" from nobody
--                             kind: lock, election or once
--                             NOT_FOUND: the token has a tombstone
--   release  token  tombstone ttl ms
--                             RETURN {the lease was the sender's 0|1, ask again 0|1}
--                             also takes a waiter out of the queue
--   heartbeat  channel  subscribed 0|1  (token  handover ttl ms)...
--                             RETURN {pttl ms | MORE_DEAD_WAITERS, head's token | "", state...}
--                             state: GRANTED | QUEUED | RETRY | NOT_FOUND
--   renew    (token  ttl ms)...
--                             RETURN {state...}
--                             state: GRANTED | NOT_FOUND | {REVOKED, why} | error text | {ABSTAINS, abstention | ""}
--                             ABSTAINS: this server of a quorum confirms nothing now; the abstention stands there if
--                             the lease's key is gone, so that the sender may re-grant it
--   regrant  token  ttl ms  fence  abstention  kind  channel
--                             RETURN {GRANTED} | {NOT_FOUND}
--                             puts a lease that a majority has just confirmed back into a server of a quorum that has
--                             lost it and abstains; only during the abstention that the sender names
--   voter                     RETURN {ms for which this server of a quorum abstains}
--                             KEYS: the voter record alone
--   reserve  token  ttl ms  number
--                             RETURN {GRANTED, first fence, others wait 0|1} | {NOT_FOUND}
--                             lengthens the lease, and reserves so many fences for those to which the sender passes
--                             it on; NOT_FOUND also after a revocation
--   execute  token  command  argument...
--                             RETURN {GRANTED, reply} | {NOT_FOUND}
--   fence    token  fence     RETURN {GRANTED} | {NOT_FOUND}
--                             stores the fence that a quorum has agreed on
--   revoke   token  force 0|1  why
--                             RETURN {done 0|1, pttl ms}
--                             token: the holder's, or a marker that inspect returned; not done: the lock holds another
--                             value, or has no TTL
--   keys     command  argument...
--                             RETURN {key...}
--                             the arguments that are keys of the command
--   inspect  max waiters      RETURN {value | "", pttl ms, record | "", handed over 0|1, departed, number of waiters,
--                                     token...}
--                             handed over: the holder has not confirmed yet; departed: how many have left the queue
--                             since it was last empty; waiters: those that are alive, without the holder

--include message

local LOCK = KEYS[1]

--include lock_plain_cases
--include queue
--include quarantine
--include voter

-- The words of the record, which read_record() sets; `tail` is the rest of the record, after the words that this
-- version knows.
local kind, fence, granted_by, last_ttl, last_released, tail, record = nil, 0, '-', '0', '-', '', nil
local is_readable = true  -- false: another version or another kind of primitive owns the record

-- Returns whether this script may change the record: there is no record, or its version is 1 and its kind is a lock or
-- a primitive over the lock. The script leaves every other record as it is, and grants nothing.
local function read_record()
  record = call('GET', RECORD)
  if not record then return true end
  local stored_kind, stored_fence, identity, ttl, released, tail_at =
    string.match(record, '^1 (%a+) (%d+) (%S+) (%d+) (%S+) %S+ %S+()')
  is_readable = stored_kind == 'lock' or stored_kind == 'unknown' or stored_kind == 'election' or stored_kind == 'once'
  if not is_readable then return false end
  if stored_kind ~= 'unknown' then kind = stored_kind end
  fence, granted_by, last_ttl, last_released, tail =
    tonumber(stored_fence), identity, ttl, released, string.sub(record, tail_at)
  return true
end

-- Returns holder and channel of the record. Only rare verbs need them, so read_record() skips them.
local function parse_holder()
  if is_readable and record then return string.match(record, '^1 %a+ %d+ %S+ %d+ %S+ (%S+) (%S+)') end
end

-- Returns why the lease was revoked, from the end of a record. An early version wrote the reason without the mark " !".
local function parse_reason(text)
  local _, why = split_free_text(text)
  return why or string.sub(text, 2)
end

-- Stores the record; besides the plain cases, no other function does. The record outlives a lease of `ttl` ms by
-- RECORD_TTL_MS, and outlives the moment at which the clock reaches the fence, even if somebody sets the clock back:
-- the fence is `ahead_ms` ahead of the clock. `ttl` nil: the record keeps its TTL, which is right while the fence stays
-- the same. `ttl` 0: no lease begins, so the record must not end earlier than before.
local function write_record(holder, channel, text, ttl, ahead_ms)
  local value = string.format(
    '1 %s %.0f %s %s %s %s %s%s', kind or 'unknown', fence, granted_by, last_ttl, last_released, holder, channel, text
  )
  if not ttl then return call('SET', RECORD, value, 'KEEPTTL') end
  ahead_ms = ahead_ms or math.max(0, math.ceil((fence - get_time_us()) / 1000))
  local record_ttl = math.max(RECORD_TTL_MS + ttl + ahead_ms, ttl == 0 and call('PTTL', RECORD) or 0)
  call('SET', RECORD, value, 'PX', string.format('%.0f', record_ttl))
end

-- Stores the record with its holder, or with `holder` if there is no record.
local function update_record(holder)
  local stored_holder, channel = parse_holder()
  write_record(stored_holder or holder, channel or '-', tail, 0)
end

-- Grants the lock for `ttl` ms. The record says `confirmed_ttl`, if the grant is a handover: its waiter will confirm it
-- for so long. Then the record also keeps why an earlier lease was taken by force. The lock's key is the last write: if
-- the server has no memory for both keys, nothing is granted. The fence of a `once` is also the time at which the run
-- began, so even a quorum must not count it up: without the identity of the last grant, next_fence() takes the clock.
local function grant(new_holder, ttl, channel, confirmed_ttl)
  local ahead_ms
  fence, ahead_ms = next_fence(fence, kind ~= 'once' and granted_by)
  granted_by, last_ttl = IDENTITY, confirmed_ttl or ttl
  local text = ''  -- words of a later version described the last grant
  local taken_until = confirmed_ttl and tail ~= '' and string.match(tail, ' !>(%d+) ')
  if taken_until and tonumber(taken_until) * 1000 > get_time_us() then text = string.match(tail, ' !>.*') end
  write_record(new_holder, channel, text, last_ttl, ahead_ms)
  call('SET', LOCK, new_holder, 'PX', ttl)
end

-- Returns the evidence in a quarantine marker; nil if the value is no marker.
local function parse_marker(holder)
  return holder and string.match(holder, '^!quarantine:(.*)')
end

-- Returns the quarantine marker if the script must grant nothing now, else nil. The marker takes the lock's key if
-- `holder` is nil. The record stores the evidence for clients that have none.
local function apply_quarantine(holder)
  if not is_readable then return end
  local left_ms, evidence = abstains_ms, abstention_evidence
  if not IN_QUORUM then left_ms, evidence = decide_quarantine(granted_by, last_ttl, fence) end
  if left_ms == 0 then return end
  if kind and granted_by ~= evidence then
    granted_by = evidence
    update_record('-')
  end
  if not holder then call('SET', LOCK, '!quarantine:' .. evidence, 'PX', left_ms) end
  return '!quarantine:' .. evidence
end

-- Frees the lock and hands it to the head of the queue, if there is one. The head stays in the queue until it confirms.
-- Returns the new holder or nil, whether the client must ask again (0|1), and the error if the grant failed. `head`:
-- what next_waiter() returned, if the caller has called it already.
local function hand_over(head)
  if IN_QUORUM and verb == 'release' and judge_voter() then  -- nothing may be handed over, but the lease is over
    call('DEL', LOCK)
    return nil, 0
  end
  if apply_quarantine() then return nil, 0 end
  local retry = 0
  if not is_readable then
    head = nil
  elseif not head then
    head, retry = next_waiter(0)
  end
  local is_granted, failure = false, nil
  if head then
    local waiter, handover_ttl, channel, wants = unpack(head)
    kind = kind or string.match(wants, '^%a+')
    is_granted, failure = pcall(grant, waiter, handover_ttl, channel, string.match(wants, '^%a+ (%d+)'))
    if is_granted then
      announce_grant(waiter, handover_ttl, channel, wants)
      return waiter, 0
    end
  end
  call('DEL', LOCK)  -- without memory the grant failed, but DEL is allowed
  return nil, retry, failure
end

-- A release needs this only where it hands over.
if IN_QUORUM and verb ~= 'release' and judge_voter(verb == 'inspect') then return voter_error end

if verb == 'acquire' then
  local ttl, handover_ttl, subscribed, channel, max_waiters = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local owner, wanted_kind = ARGV[8], ARGV[9]
  -- The record first: the key of another kind has another type.
  if not read_record() or kind and kind ~= wanted_kind then return {WRONG_KIND, record} end
  local holder = call('GET', LOCK)
  kind = wanted_kind
  local evidence = parse_marker(holder)
  if evidence and IDENTITY ~= '-' then  -- this client may know that the quarantine is over
    if granted_by == '-' then granted_by = evidence end
    holder = nil
  end
  local marker = (IN_QUORUM or holder ~= token) and apply_quarantine(holder)
  -- A copy of another server's data may have brought the sender's token here, so in a quorum even that token may abstain.
  if not holder or holder == token then holder = marker or holder end
  local has_queue_or_tombstones = call('EXISTS', QUEUE, TOMBSTONES) > 0
  if holder == token then  -- a second copy of the request, or the confirmation of a handover
    if has_queue_or_tombstones then dequeue(token) end
    local pttl = call('PTTL', LOCK)
    if parse_holder() ~= token then  -- the server has evicted the record
      grant(token, math.max(pttl, ttl), channel)
    elseif granted_by ~= IDENTITY and IDENTITY ~= '-' then
      -- The sender may not know its fence yet, and the server that granted it may have granted more since then. The
      -- record keeps that identity, as evidence for others; in a quorum the voter record is the evidence.
      fence = next_fence(fence, granted_by)
      if IN_QUORUM then granted_by = IDENTITY end
      write_record(token, channel, tail, math.max(pttl, ttl))
    end
    -- Writes in any case, even if the lease ends later already: else WAIT would count replicas that lack the grant.
    call('PEXPIRE', LOCK, math.max(pttl, ttl))
    -- An earlier version, when it hands over, makes the record for its short handover ttl.
    raise_recorded_ttl(RECORD, ttl)
    if tonumber(ttl) > RECORD_TTL_MS / 2 then extend_record(RECORD, tonumber(ttl)) end
    return {GRANTED, fence}
  end
  if has_queue_or_tombstones then
    if call('ZSCORE', TOMBSTONES, token) then return {NOT_FOUND} end
    if not holder then
      local head, retry = next_waiter(0)
      if retry == 1 then return {RETRY} end
      if head and head[1] ~= token then
        local _, failure
        holder, _, failure = hand_over(head)
        if failure then  -- the head keeps its turn: nobody may overtake because of the error
          return type(failure) == 'table' and failure or redis.error_reply(failure)
        end
      end
    end
  end
  -- Rule (g): the same owner in another process. The new token ends the old lease, and outlasts it.
  if holder and not marker and owner ~= '' and string.sub(holder, 1, #owner) == owner then
    local pttl = call('PTTL', LOCK)
    local stored_holder, old_channel = parse_holder()
    ttl = math.max(ttl, pttl)
    add_tombstone('ousted', string.format('%.0f', pttl))
    if stored_holder == holder then
      publish(old_channel, 'revoked ' .. holder .. ' !its owner has acquired the lock elsewhere')
    end
    holder = nil
  end
  if not holder then
    grant(token, ttl, channel)
    if has_queue_or_tombstones then dequeue(token) end
    return {GRANTED, fence}
  end
  if holder == '!' .. token then
    return {REVOKED, parse_reason(tail)}
  end
  local pttl = call('PTTL', LOCK)
  if pttl == -1 then return {NO_EXPIRY, holder} end
  if max_waiters == '0' then return {BUSY, holder, pttl, 0} end
  local waiting = count_if_full(token, max_waiters)
  if waiting then return {CROWDED, waiting} end
  local is_head = enqueue(token, handover_ttl, subscribed, channel, ' ' .. kind .. ' ' .. ttl)
  return {QUEUED, holder, pttl, is_head and 1 or 0}

elseif verb == 'release' then
  local tombstone_ttl = ARGV[3]
  local holder = call('GET', LOCK)
  read_record()
  local is_ours, retry = holder == token or last_released == token, 0
  local has_queue_or_tombstones = call('EXISTS', QUEUE, TOMBSTONES) > 0
  if has_queue_or_tombstones then dequeue(token) end
  if holder == token then last_released = token end
  if not holder or holder == token or holder == '!' .. token then
    local new_holder
    local taken_over_ms = holder and has_queue_or_tombstones
      and (call('ZSCORE', TOMBSTONES, 'ousted') or 0) - get_time_us() / 1000 or 0
    if taken_over_ms >= 1 then
      call('SET', LOCK, '!taken-over', 'PX', math.floor(taken_over_ms))  -- rule (g): nobody may hold it until then
    elseif has_queue_or_tombstones then
      new_holder, retry = hand_over()
    else
      call('DEL', LOCK)
    end
    -- Only the reply to a second copy of this release needs the record's last released token. So the release ignores
    -- that this write fails without memory.
    if not new_holder and is_ours and record and is_readable then
      pcall(write_record, '-', '-', string.find(tail, ' !>', 1, true) and tail or (split_free_text(tail)))
    end
  end
  add_tombstone(token, tombstone_ttl)
  return {is_ours and 1 or 0, retry}

elseif verb == 'heartbeat' then
  local holder
  return heartbeat(
    function()
      read_record()
      local retry
      holder = call('GET', LOCK)
      if not holder then holder, retry = hand_over() end
      if retry == 1 then return MORE_DEAD_WAITERS end
      return call('PTTL', LOCK), parse_marker(call('GET', LOCK)) or not is_readable
    end,
    function(waiter) return waiter == holder end
  )

elseif verb == 'renew' then
  local states = {}
  for i = 1, #KEYS, 2 do
    local lock, its_record, lease_token, ttl = KEYS[i], KEYS[i + 1], ARGV[i + 1], tonumber(ARGV[i + 2])
    local holder = redis.pcall('GET', lock)  -- a key of a wrong type must not stop the renewal of the others
    if type(holder) == 'table' then
      states[#states + 1] = holder.err
    elseif holder == lease_token then
      if call('PTTL', lock) < ttl then call('PEXPIRE', lock, ttl) end
      if #KEYS == 2 then raise_recorded_ttl(its_record, ttl) end  -- an extension comes alone
      extend_record(its_record, ttl)
      states[#states + 1] = abstains_ms > 0 and {ABSTAINS, ''} or GRANTED
    else
      -- The lease and its record have vanished together. The sender knows that the lease existed, so the
      -- identity that the sender names is evidence.
      if not IN_QUORUM and not holder and call('EXISTS', its_record) == 0 then
        local left_ms, evidence = decide_quarantine()
        if left_ms > 0 then redis.pcall('SET', lock, '!quarantine:' .. evidence, 'PX', left_ms) end
      end
      local stored = redis.pcall('GET', its_record)
      local text = type(stored) == 'string' and string.match(stored, '^1 %a+ %d+ %S+ %d+ %S+ %S+ %S+(.*)')
      local taken_from, why_taken = string.match(text or '', ' !>%d+ (%S+) (.*)')
      if holder == '!' .. lease_token then
        states[#states + 1] = {REVOKED, text and parse_reason(text) or ''}
      elseif taken_from == lease_token then
        states[#states + 1] = {REVOKED, why_taken}
      else
        local is_gone = not holder or parse_marker(holder)
        states[#states + 1] = abstains_ms > 0 and is_gone and {ABSTAINS, abstention} or NOT_FOUND
      end
    end
  end
  return states

elseif verb == 'reserve' then
  local ttl, number = tonumber(ARGV[3]), tonumber(ARGV[4])
  if call('GET', LOCK) ~= token or not read_record() or parse_holder() ~= token then return {NOT_FOUND} end
  local first_fence = next_fence(fence, granted_by)
  fence = first_fence + number - 1
  local new_ttl = math.max(ttl, call('PTTL', LOCK))
  write_record(token, select(2, parse_holder()), tail, new_ttl)
  call('PEXPIRE', LOCK, new_ttl)
  return {GRANTED, first_fence, call('ZCARD', QUEUE) > 0 and 1 or 0}

elseif verb == 'fence' then
  local agreed_fence = ARGV[3]
  if abstains_ms > 0 or call('GET', LOCK) ~= token or not read_record() then return {NOT_FOUND} end
  fence = math.max(fence, agreed_fence)
  update_record(token)
  return {GRANTED}

elseif verb == 'regrant' then
  local ttl, agreed_fence, named_abstention, wanted_kind, channel = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local holder = call('GET', LOCK)
  if named_abstention ~= abstention or holder and holder ~= token and not parse_marker(holder) then return {NOT_FOUND} end
  if call('ZSCORE', TOMBSTONES, token) or not read_record() or kind and kind ~= wanted_kind
    or string.match(tail, ' !>%d+ (%S+) ') == token  -- somebody has just taken it by force
  then
    return {NOT_FOUND}
  end
  -- Not this server's own grant: it may have forgotten what it proposed, so its next fence must be the clock.
  kind, fence, granted_by, last_ttl = wanted_kind, math.max(fence, agreed_fence), '-', ttl
  local lease_ttl = math.max(ttl, holder == token and call('PTTL', LOCK) or 0)
  write_record(token, channel, '', lease_ttl)
  call('SET', LOCK, token, 'PX', string.format('%.0f', lease_ttl))
  return {GRANTED}

elseif verb == 'voter' then
  return {abstains_ms}

elseif verb == 'execute' then
  return execute_command(call('GET', LOCK) == token)

elseif verb == 'revoke' then
  local force, reason = ARGV[3], ARGV[4]
  local holder, pttl = call('GET', LOCK), call('PTTL', LOCK)
  local named_evidence = parse_marker(token)
  if named_evidence then
    -- In a quorum a marker stands for a server that abstains, with all its names.
    if IN_QUORUM or force ~= '1' or holder and not parse_marker(holder) or not read_record() then return {0, pttl} end
    local left_ms, evidence = decide_quarantine(granted_by == '-' and parse_marker(holder) or granted_by, last_ttl, fence)
    -- The message ends only the quarantine that it names: it may be late, and its sender may have seen the server
    -- before another change. The comparison leaves out `since`, which another client may have lowered.
    if left_ms > 0 and string.match(evidence, '.*>') ~= string.match(named_evidence, '.*>') then return {0, pttl} end
    if left_ms == 0 and holder ~= token then return {0, pttl} end
    -- The sender states that no lost lease is alive, so the record names this identity from now on. The fences of lost
    -- grants are below the clock as it will be when the quarantine would have ended, or were counted up from the
    -- record's fence. The new fence passes both.
    granted_by, fence = IDENTITY, math.max(fence + 1000000, get_time_us() + math.max(left_ms, pttl) * 1000)
    write_record('-', '-', (split_free_text(tail)), 0)
  else
    if holder ~= token or force ~= '1' and pttl < 0 then return {0, pttl} end
    read_record()
  end
  local owner, channel = parse_holder()
  if force ~= '1' then
    call('SET', LOCK, '!' .. token, 'PX', math.max(1, pttl))
    if owner then write_record(owner, channel, split_free_text(tail) .. ' !' .. reason) end
  else
    dequeue(token)  -- a holder that has not confirmed stands in the queue still, and would be the next holder
    -- A holder without a channel asks, and finds the reason here for as long as its lease would have lasted.
    local ends_ms = get_time_us() / 1000 + math.max(0, pttl)
    tail = string.format('%s !>%.0f %s %s', (split_free_text(tail)), ends_ms, string.match(token, '^!?(.*)'), reason)
    if not hand_over() and owner and is_readable then write_record(owner, channel, tail, 0) end
  end
  if channel then publish(channel, 'revoked ' .. token .. ' !' .. reason) end
  return {1, pttl}

elseif verb == 'keys' then
  return call('COMMAND', 'GETKEYS', unpack(ARGV, 2))

elseif verb == 'inspect' then
  local max_waiters, holder, pttl = ARGV[2], call('GET', LOCK), call('PTTL', LOCK)
  if (not holder or parse_marker(holder)) and read_record() then
    local left_ms, evidence = abstains_ms, abstention_evidence
    if not IN_QUORUM then
      left_ms, evidence = decide_quarantine(granted_by == '-' and parse_marker(holder) or granted_by, last_ttl, fence)
    end
    if left_ms > 0 then holder, pttl = '!quarantine:' .. evidence, left_ms end
  end
  local handed_over = {}
  if holder and call('ZSCORE', QUEUE, holder) then handed_over[holder] = true end
  --include living
  return {holder or '', pttl, call('GET', RECORD) or '', handed_over[holder] and 1 or 0, departed, waiting,
    unpack(waiters)}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
