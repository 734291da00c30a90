-- Several acquires in one step: all of them are granted, or none.
--
-- Theory. The script runs the acquire of each request in that primitive's own script, one after another. At the first
-- acquire that is not granted, the script releases the earlier ones through the same scripts. No other client sees the
-- states in between.
--
-- KEYS   1 first    the keys of the first request, then those of the second, and so on
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply
--   acquire  request...
--                             RETURN {GRANTED, reply...} | {code, which of the requests, its reply}
--                             request: JSON [script, number of its keys, argument...] of an acquire that must not wait
--                             code: of the first request that was not granted, counted from 0

--function lock
--function permits

local GRANTED = 1
local verb = ARGV[1]
local STAMP = table.remove(ARGV)  -- see message.lua: the last argument of each acquire, too

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
