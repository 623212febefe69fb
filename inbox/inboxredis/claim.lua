-- Claims a message for one holder.
-- KEYS[1] the message's key; ARGV[1] the claim's value; ARGV[2] the lease in milliseconds.
-- Returns 0 when claimed, -1 when the message was processed, else the milliseconds for
-- which another holder's claim lasts.
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return 0
end
-- Other systems keep a set or some other text here when they have processed the message.
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
