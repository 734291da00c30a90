-- Statements, for a place where `max_waiters` and `handed_over` are set: a table whose keys are the holders that have not
-- confirmed yet, which stand in the queue still. They set `waiters` and `entries`, of the first waiters that are alive,
-- in order; `waiting`, how many wait; and `departed`, how many have left the queue since it was last empty. They write
-- nothing: the dead leave the queue when its turn comes to them. Of a queue longer than `max_waiters`, the statements
-- look at its beginning, and count the rest as alive.
local waiters, entries, waiting = {}, {}, call('ZCARD', QUEUE)
local departed = (call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0) - waiting
local tokens = call('ZRANGE', QUEUE, 0, max_waiters - 1)
for i, entry in ipairs(tokens[1] and call('HMGET', WAITERS, unpack(tokens)) or {}) do
  local is_alive = tonumber(string.match(entry or '', '^%d+') or 0) > get_time_us() / 1000
  if is_alive and not handed_over[tokens[i]] then
    waiters[#waiters + 1], entries[#entries + 1] = tokens[i], entry
  else
    waiting = waiting - 1
  end
end
