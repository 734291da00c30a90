-- Several at once: all or none, in one step.
--
-- Theory. The requests are those that each primitive's own script answers, one after another; at the first that is
-- not granted, those before it are released by the same scripts. Nobody sees what was in between.
--
-- KEYS   1 first    those of the first request, then those of the others
-- ARGV   1 verb, then
--   acquire  request...
--                             a request: JSON [script, number of its keys, argument...] of an acquire that does not wait
--                             RETURN {GRANTED, reply...} | {the code, which of the requests, its reply}

--function lock
--function permits

local GRANTED = 1
local verb = ARGV[1]
local STAMP = table.remove(ARGV)  -- see queue.lua: each of the scripts has it at its end

local function call_script(script, keys, args)
  local reply = script(keys, args)
  if reply.err then error(reply, 0) end
  return reply
end

if verb == 'acquire' then
  local scripts, granted, replies, next_key = {lock = lock, permits = permits}, {}, {GRANTED}, 1
  for i = 2, #ARGV do
    local args = cjson.decode(ARGV[i])
    args[#args + 1] = STAMP
    local script, keys = scripts[table.remove(args, 1)], {}
    for k = 1, table.remove(args, 1) do keys[k], next_key = KEYS[next_key], next_key + 1 end
    local ok, reply = pcall(call_script, script, keys, args)
    if not ok or reply[1] ~= GRANTED then
      for k = #granted, 1, -1 do
        local earlier = granted[k]
        earlier[1](earlier[2], {'release', earlier[3], '0', STAMP})
      end
      if ok then return {reply[1], i - 2, reply} end
      return type(reply) == 'table' and reply or redis.error_reply(reply)
    end
    granted[#granted + 1] = {script, keys, args[2]}
    replies[#replies + 1] = reply
  end
  return replies
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
