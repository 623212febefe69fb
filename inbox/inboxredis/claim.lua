-- Claims a message for one holder.
-- KEYS[1]: the message's key. ARGV[1]: the claim's value; ARGV[2]: the lease (ms).
-- Returns 0 if claimed, -1 if the message was processed, otherwise the time left (ms) of another holder's claim.
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return 0
end
-- Other systems store a set or another text here for a processed message.
if redis.call('TYPE', KEYS[1]).ok ~= 'string' then
  return -1
end
local held = redis.call('GET', KEYS[1])
if held == ARGV[1] then
  return 0 -- the client repeats a command whose reply was lost
end
if string.sub(held, 1, 11) ~= 'processing:' then
  return -1
end
return math.max(redis.call('PTTL', KEYS[1]), 1)
