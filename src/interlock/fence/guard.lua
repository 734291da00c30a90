-- Several commands in one atomic step, unless a newer holder has written to the data.
--
-- Theory. A key next to the data, in the same slot, stores the newest fence that the data has seen: so the server
-- replicates, moves and loses both together, and no other server takes part. The script compares the fence, stores it,
-- and then runs the commands; no other command can run in between.
--
-- Rules. (a) A refusal has changed nothing. (b) Redis has no rollback: the first command that fails ends the script,
-- and the reply has its number and the replies before it. (c) The script stores the fence before the first command: if
-- the server is out of memory, this write fails, and no command runs. (d) No key without a TTL; the script never
-- shortens a TTL.
--
-- KEYS   1 fence    string  the newest fence seen, decimal
--        ... the keys of the commands
-- ARGV   1 fence    the fence of the lease, decimal
--        2 keep     ms for which the server remembers the fence after its last use
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
