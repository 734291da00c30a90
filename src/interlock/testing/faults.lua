-- A fault: one lease, or all leases of one resource, end in the server before their time. Only faults.py runs this
-- script, and only on a private server. It works on a lock (a string key) and on permits (a sorted set of holders).
--
-- KEYS   1 lock or holders    string or zset
--        ... the other keys of the resource
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply
--   shorten  token  ms left   RETURN {the server has the lease 0|1}
--                             0 ms: the lease ends now; never lengthens
--   forget   token            RETURN {1}
--                             deletes all keys of the resource, as an eviction or FLUSHALL does
local key, verb, token, ms_left = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])

if verb == 'forget' then
  redis.call('DEL', unpack(KEYS))
  return {1}
end

if redis.call('TYPE', key).ok == 'zset' then
  local time, ends = redis.call('TIME'), redis.call('ZSCORE', key, token)
  if not ends then return {0} end
  local new_end = math.min(tonumber(ends), math.floor(time[1] * 1000 + time[2] / 1000) + ms_left)
  redis.call('ZADD', key, 'XX', string.format('%.0f', new_end), token)
  return {1}
end

if redis.call('GET', key) ~= token then return {0} end
if ms_left == 0 then
  redis.call('DEL', key)
elseif redis.call('PTTL', key) > ms_left then
  redis.call('PEXPIRE', key, ms_left)
end
return {1}
