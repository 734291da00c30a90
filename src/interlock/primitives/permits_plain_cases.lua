-- The plain cases of permits, before all functions as in lock_plain_cases.lua: somebody acquires free permits, or
-- releases, while no caller waits, no lease has expired, and the record names this server. Here, too, all other states
-- belong to the verbs.
local plain_record = not HAS_RETURNED and (verb == 'acquire' or verb == 'release' and ARGV[3] == '0')
  and call('EXISTS', QUEUE, TOMBSTONES) == 0 and call('GET', RECORD)
local plain_kind, stored_fence, identity, stored_ttl, released, plain_limit
if plain_record then
  plain_kind, stored_fence, identity, stored_ttl, released, plain_limit =
    string.match(plain_record, '^1 (%a+) (%d+) ([^ ]+) (%d+) ([^ ]+) (%d+)$')
end
if identity == IDENTITY and (plain_kind == 'semaphore' or plain_kind == 'rwlock')
  and (verb == 'release' or plain_kind == ARGV[8] and plain_limit == ARGV[10]) then
  local shares = call('HMGET', SHARES, 'sum', token)
  local first, time = call('ZRANGE', HOLDERS, 0, 0, 'WITHSCORES'), call('TIME')
  local now_us = time[1] * 1000000 + time[2]
  if not shares[1] ~= not first[1] or first[1] and tonumber(first[2]) <= now_us / 1000 then
    -- A lease has expired, or the server has evicted a key.
  elseif verb == 'acquire' then
    local ttl, channel, permits = ARGV[3], ARGV[6], ARGV[9]
    if now_us > tonumber(stored_fence) and tonumber(permits) <= plain_limit - (shares[1] or 0)
      and not call('ZSCORE', HOLDERS, token) then
      local fence = time[1] .. string.sub('00000' .. time[2], -6)  -- now_us as text
      local longest_ttl = first[1] and math.max(ttl, stored_ttl) or ttl
      call('SET', RECORD, '1 ' .. plain_kind .. ' ' .. fence .. ' ' .. IDENTITY .. ' ' .. longest_ttl .. ' ' .. released
        .. ' ' .. plain_limit, 'PX', math.max(RECORD_TTL_MS + ttl, call('PTTL', RECORD)))
      call('HINCRBY', SHARES, 'sum', permits)
      call('HSET', SHARES, token, permits .. ' ' .. fence .. ' ' .. channel)
      call('ZADD', HOLDERS, string.format('%.0f', now_us / 1000 + ttl), token)
      local keys_ttl = math.ceil(math.max(ttl, call('PTTL', HOLDERS)))
      call('PEXPIRE', HOLDERS, keys_ttl)
      call('PEXPIRE', SHARES, keys_ttl)
      return {GRANTED, now_us}
    end
  else
    local permits = string.match(shares[2] or '', '^(%d+) %d+ [^ ]+$')
    if permits and tonumber(call('ZSCORE', HOLDERS, token) or 0) > now_us / 1000 then
      call('ZREM', HOLDERS, token)
      call('HDEL', SHARES, token)
      call('HINCRBY', SHARES, 'sum', -permits)
      if call('EXISTS', HOLDERS) == 0 then call('DEL', SHARES) end
      local first_words = '1 ' .. plain_kind .. ' ' .. stored_fence .. ' ' .. IDENTITY .. ' ' .. stored_ttl .. ' '
      redis.pcall('SET', RECORD, first_words .. token .. ' ' .. plain_limit, 'KEEPTTL')
      return {1, 0}
    end
  end
end
