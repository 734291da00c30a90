-- Several commands in one step, unless the data has seen a newer fence.
--
-- Theory. A key beside the data, in the same slot, holds the newest fence that the data has seen. So the server
-- replicates, moves and loses both together, and the script needs no other server. The script compares the fences, then
-- raises the stored fence, then runs the commands; no other client's command comes in between.
--
-- Rules.
--  1. A refused call has changed nothing.
--  2. Redis rolls no command back: the first command that fails ends the script. The reply names that command and holds
--     the replies of the earlier ones.
--  3. The script stores the fence before it runs the first command: without memory that write must be the one that
--     fails.
--  4. The key has a TTL, and the script never shortens a TTL.
--
-- KEYS   1 fence    string  the newest fence seen, decimal
--        ... the keys of the commands
-- ARGV   1 fence    the caller's fence, decimal
--        2 keep     ms for which the key outlives this call
--        3 ...      (number of words  word...)...     one group for each command
-- RETURN {DONE, {reply...}} | {STALE, newest fence} | {WRONG_KIND, value of the key, or the error of reading it}
--      | {READONLY, error text} | {FAILED, which command from 1, error text, {reply...}}

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
