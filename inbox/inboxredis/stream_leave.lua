-- Gives back all that a consumer name holds, in order and at once, and removes the name, which
-- holds nothing then; the lease ends.
-- KEYS and ARGV[1], ARGV[2] as in stream_hold.lua; ARGV[3] the name; ARGV[4] the name that holds
-- what was given back; ARGV[5] for how many milliseconds that counts as idle.
for i = 1, 2 do
  repeat
    local pending = redis.call('XPENDING', KEYS[i], ARGV[1], '-', '+', 1000, ARGV[3])
    if #pending > 0 then
      local claim = {'XCLAIM', KEYS[i], ARGV[1], ARGV[4], 0}
      for _, entry in ipairs(pending) do
        claim[#claim + 1] = entry[1]
      end
      for _, option in ipairs({'IDLE', ARGV[5], 'JUSTID'}) do
        claim[#claim + 1] = option
      end
      redis.call(unpack(claim))
    end
  until #pending < 1000
  redis.call('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], ARGV[3])
end
if ARGV[2] ~= '' and redis.call('GET', KEYS[3]) == ARGV[2] then
  redis.call('DEL', KEYS[3])
end
return 1
