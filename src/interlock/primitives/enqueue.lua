-- Statements, for a place where `waiter`, `handover_ttl`, `subscribed`, `channel`, `wants` and `now_ms` are set. They
-- mark the waiter as alive, put it at the end of the queue unless it has a place there, and set `is_head`. `wants`
-- begins with a space, or is "". The first command makes no key: a client without the right to PEXPIRE must leave no
-- key without a TTL.
local has_waiters = call('PEXPIRE', WAITERS, QUEUE_TTL_MS) == 1
local newest = call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
is_head = not newest
if call('ZADD', QUEUE, 'NX', string.format('%.0f', (newest or 0) + 1), waiter) == 0 then
  is_head = call('ZRANGE', QUEUE, 0, 0)[1] == waiter
end
call('PEXPIRE', QUEUE, QUEUE_TTL_MS)
call('HSET', WAITERS, waiter,
  string.format('%.0f %s %s %s%s', now_ms + LIVENESS_MS, handover_ttl, subscribed, channel, wants))
if not has_waiters then call('PEXPIRE', WAITERS, QUEUE_TTL_MS) end
