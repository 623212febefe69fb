-- Requeues all entries of a consumer name, in order and at once, removes the name and ends the lease.
-- KEYS, ARGV[1] and ARGV[2] as in stream_hold.lua. ARGV[3]: the name; ARGV[4]: the name that gets the requeued entries;
-- ARGV[5]: the idle time (ms) that they get.
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
