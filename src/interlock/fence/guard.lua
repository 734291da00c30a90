-- Several commands in one step, unless a newer holder has been at the data.
--
-- Theory. The newest fence that the data has seen stands in a key beside it, in the same slot: so both are replicated,
-- moved and lost together, and no other server is asked. It is compared first, raised next, and then the commands
-- run; nothing comes in between.
--
-- Rules. (1) What is refused has changed nothing. (2) Redis takes back no command: the first that fails ends the
-- script, and the reply says which one and what those before it gave. (3) The fence is stored before the first
-- command, since without memory this is what shall fail. (4) No key without a TTL, and a TTL is never shortened.
--
-- KEYS   1 fence    string  the newest fence seen, decimal
--        ... the keys of the commands
-- ARGV   1 fence    ours, decimal
--        2 keep     ms for which the fence is remembered after its last use
--        3 ...      (number of words  word...)...     one group a command
-- RETURN {DONE, {reply...}} | {STALE, newest fence} | {WRONG_KIND, what stands in the key} | {READONLY, error text}
--      | {FAILED, which command from 1, error text, {reply...}}

local DONE, STALE, WRONG_KIND, READONLY, FAILED = 1, 2, 3, 4, 5
local FENCE, fence, ttl_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])

local newest = redis.pcall('GET', FENCE)
if type(newest) == 'table' then return {WRONG_KIND, newest.err} end
if newest and not string.match(newest, '^%d+$') then return {WRONG_KIND, newest} end
if newest and tonumber(newest) > tonumber(fence) then return {STALE, newest} end

ttl_ms = string.format('%.0f', math.max(ttl_ms, redis.call('PTTL', FENCE)))
local stored = redis.pcall('SET', FENCE, fence, 'PX', ttl_ms)
if stored.err then return {READONLY, stored.err} end

local replies, next_word = {}, 3
while next_word <= #ARGV do
  local last_word = next_word + tonumber(ARGV[next_word])
  local reply = redis.pcall(unpack(ARGV, next_word + 1, last_word))
  if type(reply) == 'table' and reply.err then return {FAILED, #replies + 1, reply.err, replies} end
  replies[#replies + 1] = reply
  next_word = last_word + 1
end
return {DONE, replies}
